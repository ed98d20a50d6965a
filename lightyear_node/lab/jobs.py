"""The jobs of a suite, one federation each, and the result rows of finished jobs.

A job is identified by its key.  Two jobs that differ only in their names (the same federation in
two grids) have the same `work`: it is done once and recorded for both.  Nothing here runs a job.
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

from lightyear_node.config.federation import ExchangeConfig, RuleConfig
from lightyear_node.config.node import TaskConfig
from lightyear_node.lab.federation import LabError
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.lab.partition import PartitionConfig
from lightyear_node.lab.results_reader import SCHEMA_VERSION
from lightyear_node.lab.simulation_records import SimulatedRound, SimulationResult, SimulationSpec
from lightyear_node.lab.suite import (
    DEFAULT_RULE,
    NONE,
    AcceptanceBlock,
    ExperimentGrid,
    RuleChoice,
    Suite,
)
from lightyear_node.types import PeerName

KEY_DIGITS = 16
SCORES_MAX = 2000
"""Scores per row and kind of peer: enough for a figure."""
SCORE_DIGITS = 4
CURVE_DIGITS = 6
"""Significant digits of the metrics of every round."""

Row = dict[str, Any]


def client_names(count: int) -> list[PeerName]:
    """Zero-padded names, because a site's share of the data follows from their sorted order."""
    width = len(str(count - 1))
    return [PeerName(f"client-{index:0{width}d}") for index in range(count)]


@cache
def bad_order(count: int, seed: int) -> tuple[int, ...]:
    """The order in which clients become bad: its first k are the set of k bad clients."""
    import numpy as np

    digest = hashlib.sha256(f"bad/{seed}".encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8], "big"))
    return tuple(int(index) for index in rng.permutation(count))


def malfunctions_of(
    names: Sequence[PeerName], malfunction: MalfunctionConfig | None, bad: int, seed: int
) -> dict[PeerName, MalfunctionConfig]:
    if malfunction is None:
        return {}
    chosen = sorted(bad_order(len(names), seed)[:bad])
    return {names[index]: malfunction for index in chosen}


@dataclass(frozen=True, slots=True)
class Job:
    """One federation under one rule, in one grid of a suite."""

    grid: str
    task: str
    entry: TaskConfig
    metric: str
    clients: int
    rounds: int
    seed: int
    rule: RuleConfig
    label: str
    malfunction: MalfunctionConfig | None
    bad: int
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    partition: PartitionConfig | None = None
    participation: float = 1.0
    curves: bool = True
    """Not part of the work: it only adds columns to the row."""

    @property
    def work(self) -> str:
        """Hash of what is computed: equal for jobs with equal results."""
        return _digest(self._computed())

    @property
    def key(self) -> str:
        named = {"grid": self.grid, "task": self.task, "metric": self.metric, "label": self.label}
        return _digest({**named, "work": self._computed()})

    @property
    def family(self) -> tuple[str, str, str]:
        """Jobs of one family take about the same time per round."""
        return self.task, _canonical(self.entry.args), self.rule.name

    @property
    def steps(self) -> int:
        return self.rounds * self.clients

    def spec(self) -> SimulationSpec:
        names = client_names(self.clients)
        return SimulationSpec(
            sites=names,
            rounds=self.rounds,
            seed=self.seed,
            rule=self.rule,
            task=self.entry,
            malfunctions=malfunctions_of(names, self.malfunction, self.bad, self.seed),
            final_only=not self.curves,
            exchange=self.exchange,
            partition=self.partition,
            participation=self.participation,
        )

    def description(self) -> str:
        text = f"{self.grid}: {self.task}, {_rule_text(self.label, self.rule)}"
        if self.malfunction is not None:
            scale = "" if self.malfunction.scale is None else f" {self.malfunction.scale:g}"
            options = "".join(f" {k}={v}" for k, v in self.malfunction.options.items())
            text += f", {self.bad} of {self.clients} {self.malfunction.kind}{scale}{options}"
        return f"{text}, seed {self.seed}"

    def identity(self) -> Row:
        """The columns of a row that identify its job."""
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
            **self._unusual_settings(),
        }

    def _computed(self) -> Row:
        return {
            "task": self.entry.model_dump(mode="json"),
            "clients": self.clients,
            "rounds": self.rounds,
            "seed": self.seed,
            "rule": self.rule.computed(),
            "malfunction": _plain(self.malfunction),
            "bad": self.bad,
            **self._unusual_settings(),
        }

    def _unusual_settings(self) -> Row:
        """Only settings that are not the default, so that finished jobs keep their keys."""
        exchange = self.exchange.selection()
        partition = self.partition.computed() if self.partition is not None else None
        return {
            **({"exchange": exchange} if exchange else {}),
            **({"partition": partition} if partition else {}),
            **({"participation": self.participation} if self.participation < 1 else {}),
        }


@dataclass(frozen=True, slots=True)
class AcceptanceJob:
    """A measurement of which messages are accepted, on one task with one seed by one rule."""

    block: AcceptanceBlock
    seed: int
    choice: RuleChoice = DEFAULT_RULE

    @property
    def key(self) -> str:
        return _digest({"task": self.block.task, **self._label(), **self.request()})

    def request(self) -> Row:
        """The specification for `lab.acceptance`."""
        from lightyear_node.lab.acceptance import AcceptanceSpec

        return AcceptanceSpec(
            sites=client_names(self.block.clients),
            rounds=self.block.rounds,
            seed=self.seed,
            malfunctions=[one for one in self.block.malfunctions if one.kind != NONE],
            task=self.block.entry,
            rule=self.choice.terms,
            exchange=self.block.exchange,
            partition=self.block.partition,
        ).to_plain()

    def labelled(self, rows: Iterable[Row]) -> list[Row]:
        """The measured rows, with task, seed and rule."""
        head = {"task": self.block.task, "seed": self.seed, **self._label()}
        return [{**head, **row} for row in rows]

    def description(self) -> str:
        rule = "".join(f", {text}" for text in self._label().values())
        return f"acceptance: {self.block.task}{rule}, seed {self.seed}"

    def _label(self) -> Row:
        """Empty for the default rule, so that finished measurements keep their keys."""
        text = _rule_text(self.choice.label, self.choice.terms)
        return {} if text == DEFAULT_RULE.label else {"rule": text}


def expand(suite: Suite) -> list[Job]:
    """Return every job once: seed by seed, so that a table is complete early, and the references
    first: training alone, then without malfunction."""
    placed = []
    for number, grid in enumerate(suite.grids):
        for turn, seed in enumerate(grid.seeds):
            for job in _jobs_of(grid, seed):
                rank = 0 if job.rule.alone else 1 if job.malfunction is None else 2
                placed.append((turn, rank, number, job))
    # The sort is stable: within a rank the order is the file's.
    placed.sort(key=lambda place: place[:3])
    return list({job.key: job for *_, job in placed}.values())


def _jobs_of(grid: ExperimentGrid, seed: int) -> Iterable[Job]:
    for choice in grid.rules:
        if choice.terms.alone:
            # Sites train alone: malfunctions make no difference.
            yield _job(grid, seed, choice, None, 0)
            continue
        for malfunction in grid.malfunctions:
            if malfunction.kind == NONE:
                yield _job(grid, seed, choice, None, 0)
                continue
            for bad in grid.bad:
                yield _job(grid, seed, choice, malfunction, bad)


def _job(
    grid: ExperimentGrid,
    seed: int,
    choice: RuleChoice,
    malfunction: MalfunctionConfig | None,
    bad: int,
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
        partition=grid.partition,
        participation=grid.participation,
        curves=grid.curves,
    )


def expand_acceptance(suite: Suite) -> list[AcceptanceJob]:
    jobs = [
        AcceptanceJob(block, seed, choice)
        for block in suite.acceptance
        for seed in block.seeds
        for choice in block.rules
    ]
    return list({job.key: job for job in jobs}.values())


def row_of(suite: str, job: Job, result: SimulationResult, seconds: float) -> Row:
    """The row of a finished job."""
    bad = set(job.spec().malfunctions)
    return {
        **_head(suite, job),
        "sites": [
            {
                "name": name,
                "malfunctioning": name in bad,
                "final": _final(rounds[-1].served, job.metric),
                "metrics": {key: _finite(value) for key, value in rounds[-1].served.items()},
                **_shadow(rounds[-1], job.metric),
                **({"curves": _curves(rounds)} if job.curves else {}),
            }
            for name, rounds in sorted(result.sites.items())
        ],
        **_judged(result, bad),
        "update_bytes": result.update_bytes,
        "trainings": {"total": result.trainings, "cached": result.cached},
        "seconds": round(seconds, 3),
    }


def _shadow(last: SimulatedRound, metric: str) -> Row:
    """For rules with a shadow: both models' scores, and which of them is served."""
    if last.worth is None:
        return {}
    return {
        "merged": _final(last.merged, metric),
        "alone": _final(last.alone, metric),
        "served": str(last.worth.served),
    }


def _curves(rounds: Sequence[SimulatedRound]) -> Row:
    """Every metric after training and after merging: a list with a value for each round."""
    measured = [one.metrics() for one in rounds]
    return {
        name: [_short(one.get(name)) for one in measured]
        for name in dict.fromkeys(name for one in measured for name in one)
    }


def _short(value: float | None) -> float | None:
    finite = _finite(value)
    return None if finite is None else float(f"{finite:.{CURVE_DIGITS}g}")


def failed_row(suite: str, job: Job, message: str) -> Row:
    return {**_head(suite, job), "failed": message}


def copied_row(row: Row, suite: str, job: Job) -> Row:
    """A finished row, as that of another job with the same work."""
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


def _judged(result: SimulationResult, bad: set[PeerName]) -> Row:
    counts: dict[str, Counter[str]] = {"honest": Counter(), "malfunctioning": Counter()}
    scores: dict[str, list[float]] = {"honest": [], "malfunctioning": []}
    for rounds in result.sites.values():
        for verdict in (verdict for one in rounds for verdict in one.verdicts):
            nature = "malfunctioning" if verdict.peer in bad else "honest"
            counts[nature]["ok" if verdict.accepted else str(verdict.reason)] += 1
            agreement = verdict.checks.get("agreement")
            if agreement is not None:
                scores[nature].append(round(agreement, SCORE_DIGITS))
    verdicts = {nature: dict(sorted(found.items())) for nature, found in counts.items() if found}
    columns: Row = {"verdicts": verdicts}
    if any(scores.values()):
        columns["scores"] = {nature: _thinned(values) for nature, values in scores.items()}
    return columns | _left_out(result, bad)


def _left_out(result: SimulationResult, bad: set[PeerName]) -> Row:
    """Count the updates that were accepted but dropped by the merge check, if the rule has one."""
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
    """Thin out evenly over judges and rounds."""
    stride = math.ceil(len(values) / SCORES_MAX) or 1
    return list(values[::stride])


def _final(metrics: Mapping[str, float | None], metric: str) -> float | None:
    if metric not in metrics:
        raise LabError(f"the task has no metric `{metric}`; it has {', '.join(metrics)}")
    return _finite(metrics[metric])


def _finite(value: float | None) -> float | None:
    """None for a model that has diverged: JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None


def _rule_text(label: str, rule: RuleConfig) -> str:
    """The label, or the settings of a rule without one."""
    if label != rule.name:
        return label
    settings = rule.model_dump(mode="json", exclude_defaults=True, exclude={"name"})
    settings |= settings.pop("options", {})
    return " ".join([label, *(f"{key}={value}" for key, value in settings.items())])


def _plain(malfunction: MalfunctionConfig | None) -> Row | None:
    return malfunction.model_dump(mode="json") if malfunction else None


def _canonical(plain: object) -> str:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def _digest(plain: object) -> str:
    # The keys of published results contain an earlier path of the built-in tasks.
    text = _canonical(plain).replace('"lightyear_node.lab.tasks.', '"lightyear_node.tasks.')
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]
