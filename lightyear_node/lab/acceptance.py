"""Measures which updates a rule accepts: honest ones and corrupted copies of them.

All sites train honestly and average all updates.  In chosen rounds each site's update is corrupted
in every way, and every other site judges each copy; no copy is merged.  So all malfunctions are
judged by the same models.  The effect of merged malfunctions is measured by `lab.simulate`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TextIO

from lightyear_node.config.federation import ExchangeConfig, RuleConfig
from lightyear_node.config.node import TaskConfig
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.lab.partition import PartitionConfig
from lightyear_node.lab.simulate import (
    FOLDER_PREFIX,
    Progress,
    SimulatedSite,
    make_sites,
)
from lightyear_node.lab.simulation_process import answer_jobs
from lightyear_node.lab.simulation_records import SimulationSpec
from lightyear_node.types import PeerName, Round, Verdict
from lightyear_node.worker.job_types import CandidateFile, verdict_to_plain

HONEST = "none"
STALE = "stale"
OLD_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class AcceptanceSpec:
    """Which corruptions are judged, in which rounds, by which sites."""

    sites: Sequence[PeerName]
    rounds: Sequence[int]
    seed: int
    malfunctions: Sequence[MalfunctionConfig]
    task: TaskConfig = field(default_factory=TaskConfig)
    rule: RuleConfig = field(default_factory=RuleConfig)
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    partition: PartitionConfig | None = None

    def to_plain(self) -> dict[str, Any]:
        # Part of a job's key: defaults are left out, so that keys of finished jobs stay valid.
        unusual = self.exchange.selection()
        return {
            **({"exchange": unusual} if unusual else {}),
            **({"partition": self.partition.computed()} if self.partition else {}),
            "sites": list(self.sites),
            "rounds": list(self.rounds),
            "seed": self.seed,
            "malfunctions": [one.model_dump(mode="json") for one in self.malfunctions],
            "task": self.task.model_dump(mode="json"),
            # All updates are averaged here: there is no merge check.
            "rule": self.rule.model_dump(mode="json", exclude={"harm_max"}),
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        return cls(
            sites=[PeerName(name) for name in plain["sites"]],
            rounds=plain["rounds"],
            seed=plain["seed"],
            malfunctions=[MalfunctionConfig.model_validate(one) for one in plain["malfunctions"]],
            task=TaskConfig.model_validate(plain["task"]),
            rule=RuleConfig.model_validate(plain["rule"]),
            exchange=ExchangeConfig.model_validate(plain.get("exchange", {})),
            partition=PartitionConfig.model_validate(plain["partition"])
            if "partition" in plain
            else None,
        )


@dataclass(frozen=True, slots=True)
class _Message:
    kind: str
    sender: CandidateFile


def measure(
    spec: AcceptanceSpec, progress: Progress = lambda done, total: None
) -> list[dict[str, Any]]:
    """Return one row per measured round, kind of message, sender and judge."""
    rounds = max(spec.rounds) + 1
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
        rule = spec.rule.model_copy(update={"harm_max": False})
        sim = SimulationSpec(
            spec.sites,
            rounds,
            spec.seed,
            rule,
            spec.task,
            exchange=spec.exchange,
            partition=spec.partition,
        )
        sites = make_sites(sim, Path(folder))
        for number in range(rounds):
            round = Round(number)
            sent = {name: site.train(name, round, measure=False) for name, site in sites.items()}
            for name, site in sites.items():
                shutil.copyfile(sent[name].path, _old(site, number))
            if number in spec.rounds:
                messages = [_Message(HONEST, candidate) for candidate in sent.values()]
                for name in sites:
                    messages += _corrupted(spec, sites, name, sent, round)
                for name, site in sites.items():
                    rows += _rows(spec, site, name, messages, round)
            for name, site in sites.items():
                _average_all(site, [one for one in sent.values() if one.peer != name], round)
            progress(number + 1, rounds)
    return rows


def _old(site: SimulatedSite, number: int) -> Path:
    return site.folder / f"sent-{number}"


def _corrupted(
    spec: AcceptanceSpec,
    sites: Mapping[PeerName, SimulatedSite],
    sender: PeerName,
    sent: Mapping[PeerName, CandidateFile],
    round: Round,
) -> Iterator[_Message]:
    others = [candidate for name, candidate in sent.items() if name != sender]
    site = sites[sender]
    for index, malfunction in enumerate(spec.malfunctions):
        out = site.folder / f"message-{index}"
        if malfunction.kind == STALE:
            shutil.copyfile(_old(site, max(0, round - OLD_ROUNDS)), out)
        else:
            site.local_site.write_corrupted(
                malfunction,
                base=site.model,
                carry=site.carry_before,
                own=site.own,
                round=round,
                out=out,
                honest=others,
                tasks={name: one.local_site.task for name, one in sites.items()},
            )
        scale = "" if malfunction.scale is None else f" {malfunction.scale:g}"
        options = "".join(f" {key}={value}" for key, value in malfunction.options.items())
        yield _Message(malfunction.kind + options + scale, replace(sent[sender], path=str(out)))


def _rows(
    spec: AcceptanceSpec,
    site: SimulatedSite,
    judge: PeerName,
    messages: Sequence[_Message],
    round: Round,
) -> Iterator[dict[str, Any]]:
    others = [message for message in messages if message.sender.peer != judge]
    senders = [message.sender for message in others]

    def verdicts(guard: bool) -> Sequence[Verdict]:
        rule = spec.rule.model_copy(update={"guard": guard})
        return site.local_site.judge(
            own=site.own, before=site.model, peers=senders, round=round, rule=rule
        ).verdicts

    for message, guarded, alone in zip(others, verdicts(True), verdicts(False), strict=True):
        plain = verdict_to_plain(guarded)
        yield {
            "round": round,
            "malfunction": message.kind,
            "sender": message.sender.peer,
            "judge": judge,
            "reason": plain["reason"],
            "checks": {key: _short(value) for key, value in plain["checks"].items()},
            "guard": guarded.accepted,
            "paper": alone.accepted,
            "agreement": _short(alone.checks.get("agreement")),
        }


def _short(value: float | None) -> float | None:
    """Five digits; None for a model without an agreement, whose features are not finite."""
    return None if value is None else float(f"{value:.5g}")


def _average_all(site: SimulatedSite, others: Sequence[CandidateFile], round: Round) -> None:
    share = 1 / (len(others) + 1)
    merged = site.folder / "merged"
    site.local_site.merge(
        own=site.own,
        accepted=[(other, share) for other in others],
        round=round,
        out=merged,
        measure=False,
    )
    merged.replace(site.model)


def answer_all(jobs: Sequence[Any], answers: TextIO) -> None:
    """Measure each spec; specs and rows are plain values."""
    answer_jobs(
        jobs,
        answers,
        lambda job, progress: measure(AcceptanceSpec.of(job), progress),
        lambda job: max(job["rounds"]) + 1,
    )
