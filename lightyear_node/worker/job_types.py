"""Types and constants of the pipe between daemon and worker: answers, error kinds, options.

Both sides import it, so it imports neither torch nor the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from lightyear_node.types import Check, Digest, Harm, PeerName, Reason, Verdict, Worth

ERROR_CONFIG = "config"
ERROR_TASK = "task"
ERROR_DISK = "disk"
ERROR_FULL = "full"
ERROR_FILES = "files"

FULL_ERRORS = "--full-errors"
"""Option of a worker: report the text and the traceback of exceptions too."""
MEMORY_MAX = "--memory-max="
"""Option of a worker: how many bytes it may allocate."""
PROGRESS_INTERVAL_S = 0.2
ANSWER_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFiles:
    """The files of one round of training."""

    round: int
    base: Path
    """The model at the start."""
    carry: Path | None
    """The training state at the start; None before the first round."""
    own: Path
    """The trained model in full."""
    outgoing: Path
    """The update for the peers; written only if it differs from `own`: in a shorter type."""
    carry_out: Path
    """The training state at the end."""

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        paths = {key: Path(plain[key]) for key in ("base", "own", "outgoing", "carry_out")}
        carry = Path(plain["carry"]) if plain["carry"] else None
        return cls(round=plain["round"], carry=carry, **paths)


@dataclass(frozen=True, slots=True)
class TrainedUpdate:
    samples: int
    metrics: Mapping[str, float]
    clamped: int = 0
    """Entries too large for the element type on the wire, which were sent as its largest number."""


LOCAL_NAMES_MAX = 100
"""Names of tensors that an answer lists."""


@dataclass(frozen=True, slots=True)
class ExchangeSummary:
    """What of a model is exchanged, and what stays at the site."""

    tensors: int
    bytes: int
    """The size of every update."""
    local_tensors: int
    local: tuple[str, ...]
    """The first names of the tensors that are not exchanged."""


def rehearsed(checks: Sequence[Check], exchange: ExchangeSummary) -> dict[str, Any]:
    """The answer to the job `rehearse`."""
    return {"checks": [asdict(check) for check in checks], "exchange": asdict(exchange)}


@dataclass(frozen=True, slots=True)
class CandidateFile:
    """A peer's verified update in a file."""

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
class MergeResult:
    metrics: Mapping[str, float]
    harm: Harm | None = None
    """Result of the merge check; None if it is disabled."""
    worth: Worth | None = None
    """Comparison with the model that never merges, if there is one."""


def verdict_to_plain(verdict: Verdict) -> dict[str, Any]:
    plain = asdict(verdict)
    # JSON has no NaN; a score that could not be computed becomes None.
    finite = verdict.score is not None and verdict.score == verdict.score
    if not verdict.details:
        del plain["details"]
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
        details=plain.get("details", {}),
    )
