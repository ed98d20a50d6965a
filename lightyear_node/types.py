"""Value types that all packages share: small frozen records.

No code here does I/O or reads a clock.  Records never contain weights: they contain the digest, and
the store has the bytes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NewType, Self

PeerName = NewType("PeerName", str)
"""A site's name in peers.yaml."""
Fingerprint = NewType("Fingerprint", str)
"""`SHA256:` and the base64 SHA-256 of a certificate, as SSH writes it."""
Digest = NewType("Digest", str)
"""64 hexadecimal digits: the hash of a weights file (see `storage.blobs.tree_digest`)."""
Round = NewType("Round", int)
Generation = NewType("Generation", int)
"""Counts the durable states of a site: greater each time that the state was lost."""

CHUNK_BYTES = 1 << 20
"""Weights are hashed, compressed, sent and resumed in chunks of this many raw bytes."""

ROUND_MAX = 2**62
"""Larger round numbers are refused: they could only serve to overflow arithmetic."""


class Reason(StrEnum):
    """Why a peer's update was used or not; the same word in logs, journal, metrics and tests."""

    OK = "ok"
    CAUGHT_UP = "caught_up"
    AGREEMENT_BELOW_TAU = "agreement_below_tau"
    TOO_FAR = "too_far"
    LOSS_REGRET = "loss_regret"
    OUTLIER = "outlier"
    OTHER_CLUSTER = "other_cluster"
    NOT_SELECTED = "not_selected"
    REFUSED_BY_RULE = "refused_by_rule"
    NONFINITE = "nonfinite"
    DOMAIN = "domain"
    SCHEMA_MISMATCH = "schema_mismatch"
    STALE_ROUND = "stale_round"
    CHECKSUM = "checksum"
    SIGNATURE = "signature"
    IDENTITY = "identity"
    FEDERATION = "federation"
    VERSION = "version"
    ECHO = "echo"
    TOO_LARGE = "too_large"
    TRUNCATED = "truncated"
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    UNSCORED = "unscored"
    UNCONFIRMED = "unconfirmed"
    PROBATION = "probation"
    QUARANTINED = "quarantined"
    BLOCKED = "blocked"
    MALFORMED = "malformed"
    DISK_FULL = "disk_full"
    DAMAGED = "damaged"


class Fate(StrEnum):
    """The result of a peer in one round."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    MISSING = "missing"


_COUNTED_AS_MISSING = frozenset(
    {
        Reason.UNREACHABLE,
        Reason.TIMEOUT,
        Reason.TRUNCATED,
        Reason.STALE_ROUND,
        Reason.UNCONFIRMED,
        Reason.DISK_FULL,
        Reason.DAMAGED,
    }
)


def fate(accepted: bool, reason: str) -> Fate:
    """Updates that are absent, already used or unconfirmed count as MISSING, not REJECTED."""
    if accepted:
        return Fate.ACCEPTED
    return Fate.MISSING if reason in _COUNTED_AS_MISSING else Fate.REJECTED


@dataclass(frozen=True, slots=True)
class Update:
    """Identifies one model that a site has announced."""

    peer: PeerName
    generation: Generation
    round: Round
    digest: Digest

    @property
    def age(self) -> tuple[Generation, Round]:
        """Later updates of one peer compare greater."""
        return (self.generation, self.round)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a site signs and announces about an update before it is fetched."""

    federation: str
    update: Update
    lamport: int
    schema: Digest
    raw_bytes: int
    samples: int
    base: Digest | None = None
    """The site's previous update: a receiver that has it can fetch only the differences."""
    dtype: str = "float32"
    """Element type on the wire; values were rounded if it is not float32."""


@dataclass(frozen=True, slots=True)
class SignedManifest:
    manifest: Manifest
    signature: bytes

    def to_plain(self) -> dict[str, Any]:
        return {"manifest": asdict(self.manifest), "signature": self.signature.hex()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        fields = dict(plain["manifest"])
        update = Update(**fields.pop("update"))
        return cls(Manifest(update=update, **fields), bytes.fromhex(plain["signature"]))


@dataclass(frozen=True, slots=True)
class SignedHead:
    """The newest record of a site's journal; its hash covers the whole history before it."""

    seq: int
    hash: Digest
    signature: bytes

    def to_plain(self) -> dict[str, Any]:
        return {"seq": self.seq, "hash": self.hash, "signature": self.signature.hex()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        return cls(plain["seq"], plain["hash"], bytes.fromhex(plain["signature"]))


@dataclass(frozen=True, slots=True)
class Hello:
    """What two sites compare when they connect."""

    version_min: int
    version_max: int
    federation: str
    agreement: Digest
    schema: Digest
    initial_model: Digest
    round: Round
    boot_id: str
    wall_time_ns: int
    lamport: int
    probe: bool = False
    """Whether this is only a query: answered despite differences, without side effects."""
    yours: SignedManifest | None = None
    """The newest update of the receiver that the sender knows."""
    clauses: Mapping[str, str] = field(default_factory=dict)
    """Keys of the federation config, each with a short digest of its value."""
    your_head: SignedHead | None = None
    """The newest head of the receiver's journal that the sender holds."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Two different updates that one site signed for one round and generation."""

    first: SignedManifest
    second: SignedManifest

    def to_plain(self) -> dict[str, Any]:
        return {"first": self.first.to_plain(), "second": self.second.to_plain()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        first, second = plain["first"], plain["second"]
        return cls(SignedManifest.from_plain(first), SignedManifest.from_plain(second))


@dataclass(frozen=True, slots=True)
class Opinion:
    """A site's verdict on a peer's update, sent to that peer if verdicts are shared; no score."""

    round: Round
    digest: Digest
    accepted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Announcement:
    """A site's state, repeated at every heartbeat, so a lost message does no harm."""

    lamport: int
    round: Round
    phase: str
    latest: SignedManifest | None
    seen: tuple[SignedManifest, ...] = ()
    """The newest updates of other sites that the sender vouches for: one per site and round."""
    evidence: tuple[Evidence, ...] = ()
    head: SignedHead | None = None
    progress: int = 0
    """Grows while the sender trains."""
    opinion: Opinion | None = None
    boot_id: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What this site decided about one peer's update, and why."""

    peer: PeerName
    accepted: bool
    reason: Reason
    score: float | None = None
    weight: float = 0.0
    checks: Mapping[str, float] = field(default_factory=dict)
    digest: Digest | None = None
    details: Mapping[str, str] = field(default_factory=dict)
    """Words for the explanation, chosen by us and not by the peer; no decision depends on them.

    `tensor`: the tensor that is farthest from ours.  `loss`: `measured` if it is not of classes.
    """

    @property
    def fate(self) -> Fate:
        return fate(self.accepted, self.reason)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A merge that was measured: the peers left out, and its loss on our validation data."""

    without: tuple[PeerName, ...]
    loss: float
    gain: float | None = None
    """Mean change of our decisions' scores; None if they were not compared."""
    error: float | None = None
    """Standard error of the gain."""


@dataclass(frozen=True, slots=True)
class Harm:
    """The check of a round's merge on our validation data, and the peers left out by it.

    A loss that is not a finite number is recorded as the largest float.
    """

    limit: float
    """The highest loss that was allowed for the merged model."""
    loss_before: float
    """Loss of our own trained model."""
    tried: tuple[Attempt, ...]
    dropped: tuple[PeerName, ...]
    """Worst first; their weight in the mean went to our own model."""
    kept_local: bool
    """Whether all peers were left out, so our own model is the result."""

    def description(self) -> str:
        """Which peers were left out and why, or that the merge did no harm."""
        first = self.tried[0]
        if first.loss <= self.limit and first.gain is not None and first.error is not None:
            change = f"our decisions would have changed by {100 * first.gain:+.3g}"
            change += f" ± {100 * first.error:.2g} points"
        else:
            change = f"our validation loss would have gone from {self.loss_before:.3g} to"
            change += " no number" if first.loss == sys.float_info.max else f" {first.loss:.3g}"
            change += f", above the limit of {self.limit:.3g}"
        if self.kept_local:
            return f"kept our own model, merging does harm whichever peers are left out: {change}"
        if self.dropped:
            return f"left {', '.join(self.dropped)} out of the merge: with all updates {change}"
        return "merging did no harm"

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        tried = tuple(
            Attempt(tuple(one["without"]), one["loss"], one.get("gain"), one.get("error"))
            for one in plain["tried"]
        )
        return cls(
            plain["limit"],
            plain["loss_before"],
            tried,
            tuple(plain["dropped"]),
            plain["kept_local"],
        )


class Served(StrEnum):
    """The model that a site uses and exports: the federated one, or the one trained alone."""

    FEDERATED = "federated"
    ALONE = "alone"


@dataclass(frozen=True, slots=True)
class PairedScores:
    """The federated model against the one trained alone, on the same samples of one round."""

    samples: int
    gain: float
    """Mean of the differences of their scores; positive if the federated model is better."""
    variance: float
    """Of one sample's difference."""
    federated: float
    """Mean score of the federated model."""

    @property
    def error(self) -> float:
        """Standard error of the gain."""
        return math.sqrt(self.variance / self.samples)


@dataclass(frozen=True, slots=True)
class Worth:
    """What the federation is worth to this site, over the last rounds, and the model to serve."""

    unit: str
    """`decisions` (share that is right, or Dice), or `loss` (its negative)."""
    recent: tuple[PairedScores, ...]
    """Of the last rounds, newest last."""
    served: Served
    alone: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the model trained alone, in the newest round."""

    losses: tuple[PairedScores, ...] = ()
    """The same comparison of minus the losses; empty if `recent` is of losses."""

    @property
    def samples(self) -> int:
        return sum(one.samples for one in self.recent)

    @property
    def gain(self) -> float:
        return _mean_gain(self.recent)

    @property
    def error(self) -> float:
        """Standard error of the gain, as if every sample of every round were independent."""
        within = sum(one.variance * one.samples for one in self.recent) / self.samples
        return math.sqrt(within / self.samples)

    @property
    def lower_loss(self) -> bool:
        """Whether the federated model's loss is lower; True if `recent` is of losses."""
        return not self.losses or _mean_gain(self.losses) > 0

    def to_plain(self) -> dict[str, Any]:
        """With gain and error, for readers of the journal."""
        return {**asdict(self), "gain": self.gain, "error": self.error}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        recent = tuple(PairedScores(**one) for one in plain["recent"])
        losses = tuple(PairedScores(**one) for one in plain["losses"])
        return cls(plain["unit"], recent, Served(plain["served"]), plain["alone"], losses)

    def description(self) -> str:
        """The gain with its standard error, and which model is served."""
        percent = self.unit == "decisions"
        factor, unit = (100, " points") if percent else (1, " of the loss")
        return (
            f"federated against alone {factor * self.gain:+.3g} ± {factor * self.error:.2g}{unit},"
            f" serving the {'federated model' if self.served is Served.FEDERATED else 'one alone'}"
        )


def _mean_gain(rounds: Sequence[PairedScores]) -> float:
    return sum(one.gain * one.samples for one in rounds) / sum(one.samples for one in rounds)


@dataclass(frozen=True, slots=True)
class Transfer:
    """The cost of transferring one update."""

    raw_bytes: int
    wire_bytes: int
    seconds: float

    def __add__(self, other: Transfer) -> Transfer:
        return Transfer(
            self.raw_bytes + other.raw_bytes,
            self.wire_bytes + other.wire_bytes,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True, slots=True)
class Opened:
    """What the worker reports about the model and data of the user's task."""

    device: str
    parameters: int
    train_samples: int
    val_samples: int
    head: str
    floor: float
    """The agreement of unrelated features on this number of validation samples."""
    warnings: Sequence[str] = ()
    """Warnings for the operator."""


class Mark(StrEnum):
    """Result of one check of a diagnosis."""

    HOLDS = "holds"
    DIFFERS = "differs"
    """A warning: nothing is broken, but an operator should look."""
    BROKEN = "broken"
    NOT_REACHED = "not_reached"
    NOT_KNOWN = "not_known"
    """There is nothing to compare with."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a diagnosis; for a warning or a failure, with advice."""

    name: str
    mark: Mark
    about: str = ""
    advice: str = ""
