"""Which messages would be accepted?  Honest sites, and a corrupted copy of everything they send.

All sites train honestly and average everybody.  In chosen rounds each site's update is corrupted in
every way, and every other site judges each copy, without any of them being merged: so all kinds of
malfunction meet the same judges in the same state.  Final scores need closed loops (`simulate`).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TextIO

from lightyear_node.config.agreement import ExchangeTerms, RuleTerms
from lightyear_node.config.site import Malfunction, TaskEntry
from lightyear_node.lab.simulate import FOLDER_PREFIX, Progress, Seat, answer_jobs, take_seats
from lightyear_node.lab.simulate import Spec as SimSpec
from lightyear_node.records import PeerName, Round, Verdict
from lightyear_node.worker.jobs import Candidate, verdict_to_plain

HONEST = "none"
STALE = "stale"
OLD_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Spec:
    """Whose messages are corrupted how, and in which rounds."""

    sites: Sequence[PeerName]
    rounds: Sequence[int]
    seed: int
    malfunctions: Sequence[Malfunction]
    task: TaskEntry = field(default_factory=TaskEntry)
    rule: RuleTerms = field(default_factory=RuleTerms)
    exchange: ExchangeTerms = field(default_factory=ExchangeTerms)

    def to_plain(self) -> dict[str, Any]:
        # Jobs are known by this: what is as usual must not change who they are.
        unusual = self.exchange.selection()
        return {
            **({"exchange": unusual} if unusual else {}),
            "sites": list(self.sites),
            "rounds": list(self.rounds),
            "seed": self.seed,
            "malfunctions": [one.model_dump(mode="json") for one in self.malfunctions],
            "task": self.task.model_dump(mode="json"),
            # Everybody is averaged here, whatever that does to a model.
            "rule": self.rule.model_dump(mode="json", exclude={"harm_max"}),
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        return cls(
            sites=[PeerName(name) for name in plain["sites"]],
            rounds=plain["rounds"],
            seed=plain["seed"],
            malfunctions=[Malfunction.model_validate(one) for one in plain["malfunctions"]],
            task=TaskEntry.model_validate(plain["task"]),
            rule=RuleTerms.model_validate(plain["rule"]),
            exchange=ExchangeTerms.model_validate(plain.get("exchange", {})),
        )


@dataclass(frozen=True, slots=True)
class _Message:
    kind: str
    sender: Candidate


def measure(spec: Spec, progress: Progress = lambda done, total: None) -> list[dict[str, Any]]:
    """A row for every measured round, kind of message, sender and judge."""
    rounds = max(spec.rounds) + 1
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
        rule = spec.rule.model_copy(update={"harm_max": False})
        sim = SimSpec(spec.sites, rounds, spec.seed, rule, spec.task, exchange=spec.exchange)
        seats = take_seats(sim, Path(folder))
        for number in range(rounds):
            round = Round(number)
            carries = {name: _copied(seat.carry) for name, seat in seats.items()}
            sent = {name: seat.train(name, round, measure=False) for name, seat in seats.items()}
            for name, seat in seats.items():
                shutil.copyfile(sent[name].path, _old(seat, number))
            if number in spec.rounds:
                messages = [_Message(HONEST, candidate) for candidate in sent.values()]
                for name, seat in seats.items():
                    messages += _corrupted(spec, seat, sent[name], carries[name], round)
                for name, seat in seats.items():
                    rows += _rows(spec, seat, name, messages, round)
            for name, seat in seats.items():
                _average_everybody(seat, [one for one in sent.values() if one.peer != name], round)
            progress(number + 1, rounds)
    return rows


def _copied(carry: Path) -> Path | None:
    """What training begins with is replaced by what it ends with; poisoned training needs it."""
    if not carry.exists():
        return None
    copy = carry.with_name("carry_before")
    shutil.copyfile(carry, copy)
    return copy


def _old(seat: Seat, number: int) -> Path:
    return seat.folder / f"sent-{number}"


def _corrupted(
    spec: Spec, seat: Seat, honest: Candidate, carry: Path | None, round: Round
) -> Iterator[_Message]:
    for index, malfunction in enumerate(spec.malfunctions):
        out = seat.folder / f"message-{index}"
        if malfunction.kind == STALE:
            shutil.copyfile(_old(seat, max(0, round - OLD_ROUNDS)), out)
        else:
            seat.site.pretend(
                malfunction, base=seat.model, carry=carry, own=seat.own, round=round, out=out
            )
        scale = "" if malfunction.scale is None else f" {malfunction.scale:g}"
        yield _Message(malfunction.kind + scale, replace(honest, path=str(out)))


def _rows(
    spec: Spec, seat: Seat, judge: PeerName, messages: Sequence[_Message], round: Round
) -> Iterator[dict[str, Any]]:
    others = [message for message in messages if message.sender.peer != judge]
    senders = [message.sender for message in others]

    def verdicts(guard: bool) -> Sequence[Verdict]:
        rule = spec.rule.model_copy(update={"guard": guard})
        return seat.site.judge(
            own=seat.own, before=seat.model, peers=senders, round=round, rule=rule
        ).verdicts

    for message, guarded, alone in zip(others, verdicts(True), verdicts(False), strict=True):
        plain = verdict_to_plain(guarded)
        yield {
            "round": round,
            "malfunction": message.kind,
            "sender": message.sender.peer,
            "judge": judge,
            "reason": plain["reason"],
            "checks": {key: float(f"{value:.5g}") for key, value in plain["checks"].items()},
            "guard": guarded.accepted,
            "paper": alone.accepted,
        }


def _average_everybody(seat: Seat, others: Sequence[Candidate], round: Round) -> None:
    share = 1 / (len(others) + 1)
    merged = seat.folder / "merged"
    seat.site.merge(
        own=seat.own,
        accepted=[(other, share) for other in others],
        round=round,
        out=merged,
        measure=False,
    )
    merged.replace(seat.model)


def answer_all(jobs: Sequence[Any], answers: TextIO) -> None:
    """The rows of each spec, as plain values."""
    answer_jobs(
        jobs,
        answers,
        lambda job, progress: measure(Spec.of(job), progress),
        lambda job: max(job["rounds"]) + 1,
    )
