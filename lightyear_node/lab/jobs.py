"""What a suite expands to, one federation each, and the line that a finished one leaves behind.

A job is known by its key.  Two jobs that differ only in what they are called (the same federation
in two grids) have the same `work`: it is done once and told twice.  Nothing here runs anything.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from lightyear_node.config.agreement import ExchangeTerms, RuleTerms
from lightyear_node.config.site import Malfunction, TaskEntry
from lightyear_node.lab.federation import LabError
from lightyear_node.lab.rows import SCHEMA_VERSION
from lightyear_node.lab.simulate import SimResult, Spec
from lightyear_node.lab.suite import NONE, AcceptanceBlock, Grid, RuleChoice, Suite
from lightyear_node.records import PeerName

KEY_DIGITS = 16
SCORES_MAX = 2000
"""Of each kind of peer; a drawing needs no more, and a line stays readable."""
SCORE_DIGITS = 4

Row = dict[str, Any]


def client_names(count: int) -> list[PeerName]:
    """Padded, because a site's share of the data goes by its place among the sorted names."""
    width = len(str(count - 1))
    return [PeerName(f"client-{index:0{width}d}") for index in range(count)]


@cache
def bad_order(count: int, seed: int) -> tuple[int, ...]:
    """The order in which clients turn bad: the first k of it are the bad set of size k."""
    import numpy as np

    digest = hashlib.sha256(f"bad/{seed}".encode()).digest()
    chance = np.random.default_rng(int.from_bytes(digest[:8], "big"))
    return tuple(int(index) for index in chance.permutation(count))


def malfunctions_of(
    names: Sequence[PeerName], malfunction: Malfunction | None, bad: int, seed: int
) -> dict[PeerName, Malfunction]:
    if malfunction is None:
        return {}
    chosen = sorted(bad_order(len(names), seed)[:bad])
    return {names[index]: malfunction for index in chosen}


@dataclass(frozen=True, slots=True)
class Job:
    """One federation under one rule, as one grid of a suite asks for it."""

    grid: str
    task: str
    entry: TaskEntry
    metric: str
    clients: int
    rounds: int
    seed: int
    rule: RuleTerms
    label: str
    malfunction: Malfunction | None
    bad: int
    exchange: ExchangeTerms = field(default_factory=ExchangeTerms)

    @property
    def work(self) -> str:
        """Equal for jobs that would compute the same."""
        return _digest(self._computed())

    @property
    def key(self) -> str:
        named = {"grid": self.grid, "task": self.task, "metric": self.metric, "label": self.label}
        return _digest({**named, "work": self._computed()})

    @property
    def family(self) -> tuple[str, str, str]:
        """Jobs whose rounds cost about the same."""
        return self.task, _canonical(self.entry.args), self.rule.name

    @property
    def steps(self) -> int:
        return self.rounds * self.clients

    def spec(self) -> Spec:
        names = client_names(self.clients)
        return Spec(
            sites=names,
            rounds=self.rounds,
            seed=self.seed,
            rule=self.rule,
            task=self.entry,
            malfunctions=malfunctions_of(names, self.malfunction, self.bad, self.seed),
            final_only=True,
            exchange=self.exchange,
        )

    def in_words(self) -> str:
        words = f"{self.grid}: {self.task}, {self._rule_in_words()}"
        if self.malfunction is not None:
            scale = "" if self.malfunction.scale is None else f" {self.malfunction.scale:g}"
            words += f", {self.bad} of {self.clients} {self.malfunction.kind}{scale}"
        return f"{words}, seed {self.seed}"

    def identity(self) -> Row:
        """What a line says about its job, whether or not that succeeded."""
        return {
            "grid": self.grid,
            "task": self.task,
            "args": self.entry.args,
            "metric": self.metric,
            "clients": self.clients,
            "rounds": self.rounds,
            "seed": self.seed,
            "rule": self.rule.name,
            "label": self.label,
            "rule_terms": self.rule.computed(),
            "malfunction": self.malfunction.kind if self.malfunction else NONE,
            "malfunction_terms": _plain(self.malfunction),
            "bad": self.bad,
            **self._travelling(),
        }

    def _rule_in_words(self) -> str:
        if self.label != self.rule.name:
            return self.label
        settings = self.rule.model_dump(mode="json", exclude_defaults=True, exclude={"name"})
        settings |= settings.pop("options", {})
        return " ".join([self.label, *(f"{key}={value}" for key, value in settings.items())])

    def _computed(self) -> Row:
        return {
            "task": self.entry.model_dump(mode="json"),
            "clients": self.clients,
            "rounds": self.rounds,
            "seed": self.seed,
            "rule": self.rule.computed(),
            "malfunction": _plain(self.malfunction),
            "bad": self.bad,
            **self._travelling(),
        }

    def _travelling(self) -> Row:
        """Only where it is not as usual, so that finished jobs keep their keys."""
        unusual = self.exchange.selection()
        return {"exchange": unusual} if unusual else {}


@dataclass(frozen=True, slots=True)
class AcceptanceJob:
    """Which messages are accepted, on one task with one seed; rows of their own kind."""

    block: AcceptanceBlock
    seed: int

    @property
    def key(self) -> str:
        return _digest({"task": self.block.task, **self.question()})

    def question(self) -> Row:
        """What `lab.acceptance` is asked, as it reads it."""
        from lightyear_node.lab.acceptance import Spec as AcceptanceSpec

        return AcceptanceSpec(
            sites=client_names(self.block.clients),
            rounds=self.block.rounds,
            seed=self.seed,
            malfunctions=[one for one in self.block.malfunctions if one.kind != NONE],
            task=self.block.entry,
            exchange=self.block.exchange,
        ).to_plain()

    def told(self, rows: Iterable[Row]) -> list[Row]:
        """The measured rows, with whose they are."""
        return [{"task": self.block.task, "seed": self.seed, **row} for row in rows]

    def in_words(self) -> str:
        return f"acceptance: {self.block.task}, seed {self.seed}"


def expand(suite: Suite) -> list[Job]:
    """Every job once.  Seed by seed, so that a table is complete early; what others are compared
    with comes first: training alone, then everybody honest."""
    placed = []
    for number, grid in enumerate(suite.grids):
        for turn, seed in enumerate(grid.seeds):
            for job in _jobs_of(grid, seed):
                rank = 0 if job.rule.alone else 1 if job.malfunction is None else 2
                placed.append((turn, rank, number, job))
    # The sort is stable: within a rank the order is the file's.
    placed.sort(key=lambda place: place[:3])
    return list({job.key: job for *_, job in placed}.values())


def _jobs_of(grid: Grid, seed: int) -> Iterable[Job]:
    for choice in grid.rules:
        if choice.terms.alone:
            # Nobody hears anybody: no malfunction makes a difference.
            yield _job(grid, seed, choice, None, 0)
            continue
        for malfunction in grid.malfunctions:
            if malfunction.kind == NONE:
                yield _job(grid, seed, choice, None, 0)
                continue
            for bad in grid.bad:
                yield _job(grid, seed, choice, malfunction, bad)


def _job(
    grid: Grid, seed: int, choice: RuleChoice, malfunction: Malfunction | None, bad: int
) -> Job:
    return Job(
        grid=grid.name,
        task=grid.task,
        entry=grid.entry,
        metric=grid.metric,
        clients=grid.clients,
        rounds=grid.rounds,
        seed=seed,
        rule=choice.terms,
        label=choice.label,
        malfunction=malfunction,
        bad=bad,
        exchange=grid.exchange,
    )


def expand_acceptance(suite: Suite) -> list[AcceptanceJob]:
    jobs = [AcceptanceJob(block, seed) for block in suite.acceptance for seed in block.seeds]
    return list({job.key: job for job in jobs}.values())


def row_of(suite: str, job: Job, result: SimResult, seconds: float) -> Row:
    """The line of a finished job."""
    bad = set(job.spec().malfunctions)
    return {
        **_head(suite, job),
        "sites": [
            {
                "name": name,
                "malfunctioning": name in bad,
                "final": _final(rounds[-1].merged, job.metric),
                "metrics": {key: _finite(value) for key, value in rounds[-1].merged.items()},
            }
            for name, rounds in sorted(result.sites.items())
        ],
        **_judged(result, bad),
        "update_bytes": result.update_bytes,
        "seconds": round(seconds, 3),
    }


def failed_row(suite: str, job: Job, message: str) -> Row:
    return {**_head(suite, job), "failed": message}


def retold(row: Row, suite: str, job: Job) -> Row:
    """A finished line as that of another job with the same work."""
    sites = [{**site, "final": _final(site["metrics"], job.metric)} for site in row["sites"]]
    return {**row, **_head(suite, job), "sites": sites}


def _head(suite: str, job: Job) -> Row:
    return {
        "schema_version": SCHEMA_VERSION,
        "key": job.key,
        "work": job.work,
        "suite": suite,
        **job.identity(),
    }


def _judged(result: SimResult, bad: set[PeerName]) -> Row:
    counts: dict[str, Counter[str]] = {"honest": Counter(), "malfunctioning": Counter()}
    scores: dict[str, list[float]] = {"honest": [], "malfunctioning": []}
    for rounds in result.sites.values():
        for verdict in (verdict for one in rounds for verdict in one.verdicts):
            nature = "malfunctioning" if verdict.peer in bad else "honest"
            counts[nature]["ok" if verdict.accepted else str(verdict.reason)] += 1
            agreement = verdict.checks.get("agreement")
            if agreement is not None:
                scores[nature].append(round(agreement, SCORE_DIGITS))
    told: Row = {"verdicts": {nature: dict(sorted(c.items())) for nature, c in counts.items() if c}}
    if any(scores.values()):
        told["scores"] = {nature: _thinned(values) for nature, values in scores.items()}
    return told | _left_out(result, bad)


def _left_out(result: SimResult, bad: set[PeerName]) -> Row:
    """Who was accepted and yet left out of merges, where merged models are measured at all."""
    found = [one.harm for rounds in result.sites.values() for one in rounds if one.harm is not None]
    dropped = [peer in bad for harm in found for peer in harm.dropped]
    counts = {
        "measured": len(found),
        "honest": dropped.count(False),
        "malfunctioning": dropped.count(True),
        "kept_local": sum(harm.kept_local for harm in found),
    }
    return {"merges": counts} if found else {}


def _thinned(values: Sequence[float]) -> list[float]:
    """Evenly, so that all judges and rounds keep their part."""
    stride = math.ceil(len(values) / SCORES_MAX) or 1
    return list(values[::stride])


def _final(metrics: Mapping[str, float | None], metric: str) -> float | None:
    if metric not in metrics:
        raise LabError(f"the task has no metric `{metric}`; it has {', '.join(metrics)}")
    return _finite(metrics[metric])


def _finite(value: float | None) -> float | None:
    """JSON has no NaN; a model that has diverged has no score."""
    return value if value is not None and math.isfinite(value) else None


def _plain(malfunction: Malfunction | None) -> Row | None:
    return malfunction.model_dump(mode="json") if malfunction else None


def _canonical(plain: object) -> str:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def _digest(plain: object) -> str:
    return hashlib.sha256(_canonical(plain).encode()).hexdigest()[:KEY_DIGITS]
