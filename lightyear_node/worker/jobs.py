"""The vocabulary between daemon and worker: job names, answers, and the words for failures.

Shared by both sides of the pipe, so it imports neither torch nor the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from lightyear_node.records import Digest, Harm, PeerName, Reason, Verdict

ERROR_CONFIG = "config"
ERROR_TASK = "task"
ERROR_DISK = "disk"
ERROR_FULL = "full"

FULL_ERRORS = "--full-errors"
"""To a new worker: tell the text of exceptions too, and their traceback."""
PROGRESS_INTERVAL_S = 0.2
ANSWER_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Trained:
    samples: int
    metrics: Mapping[str, float]
    clamped: int = 0
    """Entries that were too large for the type they travel in, and were sent as its largest."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer's verified update, lying in a file."""

    peer: PeerName
    path: str
    samples: int
    digest: Digest

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        return cls(
            PeerName(plain["peer"]), plain["path"], plain["samples"], Digest(plain["digest"])
        )


@dataclass(frozen=True, slots=True)
class Merged:
    metrics: Mapping[str, float]
    harm: Harm | None = None
    """What measuring the merged model found; None where it was not measured."""


def verdict_to_plain(verdict: Verdict) -> dict[str, Any]:
    plain = asdict(verdict)
    # JSON has no NaN; a score that could not be computed is no score.
    finite = verdict.score is not None and verdict.score == verdict.score
    return {
        **plain,
        "score": verdict.score if finite else None,
        "checks": {key: value for key, value in verdict.checks.items() if value == value},
    }


def verdict_from_plain(plain: Mapping[str, Any]) -> Verdict:
    return Verdict(
        peer=PeerName(plain["peer"]),
        accepted=plain["accepted"],
        reason=Reason(plain["reason"]),
        score=plain["score"],
        weight=plain["weight"],
        checks=plain["checks"],
        digest=plain["digest"],
    )
