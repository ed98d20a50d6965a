"""The words of this program: small frozen records that every other module shares.

Nothing here acts, reads a clock or touches a disk.  Weights are never part of a record: a record
carries the digest that names them, and the store has the bytes.
"""

from __future__ import annotations

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
"""64 hexadecimal digits that name the content of a weights file (see `store.tree_digest`)."""
Round = NewType("Round", int)
Generation = NewType("Generation", int)
"""Which memory a site works from: a greater one each time that it has to begin without any."""

CHUNK_BYTES = 1 << 20
"""Weights are hashed, compressed, sent and resumed in pieces of this many raw bytes."""

ROUND_MAX = 2**62
"""Larger round numbers are refused: they could only be meant to overflow somebody's arithmetic."""


class Reason(StrEnum):
    """Why a peer's update was used, or was not.  The same word in log, journal, metric and test."""

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


class Fate(StrEnum):
    """What became of a peer in one round."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    MISSING = "missing"


_NOTHING_CAME = frozenset(
    {
        Reason.UNREACHABLE,
        Reason.TIMEOUT,
        Reason.TRUNCATED,
        Reason.STALE_ROUND,
        Reason.UNCONFIRMED,
        Reason.DISK_FULL,
    }
)


def fate(accepted: bool, reason: str) -> Fate:
    """Nobody is rejected for what never arrived, had been used before, or too few have seen."""
    if accepted:
        return Fate.ACCEPTED
    return Fate.MISSING if reason in _NOTHING_CAME else Fate.REJECTED


@dataclass(frozen=True, slots=True)
class Update:
    """What identifies one model that one site has announced."""

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
    """What a site says, and signs, about an update before anybody pulls it."""

    federation: str
    update: Update
    lamport: int
    schema: Digest
    raw_bytes: int
    samples: int
    base: Digest | None = None
    """The peer's update before this one: who holds it may fetch the differences only."""
    dtype: str = "float32"
    """As what floating point tensors travel; anything but float32 was rounded to it."""


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
    """The newest record of a site's journal, whose hash stands for the whole history before it."""

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
    """What two sites compare when they meet."""

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
    """Only a question: answered whatever the difference, and then forgotten."""
    yours: SignedManifest | None = None
    """The newest of the receiver's own updates that the sender has heard of."""
    clauses: Mapping[str, str] = field(default_factory=dict)
    """The agreement's keys, each with a short digest of its value."""
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
    """What a site tells another about its update, where verdicts are shared; never the score."""

    round: Round
    digest: Digest
    accepted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Announcement:
    """A site's state, repeated at every heartbeat: losing one costs nothing."""

    lamport: int
    round: Round
    phase: str
    latest: SignedManifest | None
    seen: tuple[SignedManifest, ...] = ()
    """The newest updates of others that the sender has heard of: one of each site and round."""
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

    @property
    def fate(self) -> Fate:
        return fate(self.accepted, self.reason)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A merge that was measured: who was left out of it, and its loss on our validation data."""

    without: tuple[PeerName, ...]
    loss: float


@dataclass(frozen=True, slots=True)
class Harm:
    """What a round's merge would have done to our model, and who was left out for it.

    A loss that is no number is recorded as the largest number there is.
    """

    limit: float
    """The greatest loss that a merged model was allowed."""
    loss_before: float
    """Of our own trained model."""
    tried: tuple[Attempt, ...]
    dropped: tuple[PeerName, ...]
    """Worst first; their part of the mean went to our own model."""
    kept_local: bool
    """Whether nobody was left, so that our own model is the round's."""

    def in_words(self) -> str:
        """Who was left out and why; for a merge of which nobody was, that it was harmless."""
        after = self.tried[0].loss
        change = f"our validation loss would have gone from {self.loss_before:.3g} to"
        change += " no number" if after == sys.float_info.max else f" {after:.3g}"
        change += f", above the limit of {self.limit:.3g}"
        if self.kept_local:
            return f"kept our own model, whoever is left out merging does harm: {change}"
        if self.dropped:
            return f"left {', '.join(self.dropped)} out of the merge: with everybody {change}"
        return "merging did no harm"

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        tried = tuple(Attempt(tuple(one["without"]), one["loss"]) for one in plain["tried"])
        return cls(
            plain["limit"],
            plain["loss_before"],
            tried,
            tuple(plain["dropped"]),
            plain["kept_local"],
        )


@dataclass(frozen=True, slots=True)
class Transfer:
    """What moving one update cost."""

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
    """What the worker tells of the model and data that the user's task has built."""

    device: str
    parameters: int
    train_samples: int
    val_samples: int
    head: str
    floor: float
    """The agreement that unrelated features would show on so few validation samples."""
    warnings: Sequence[str] = ()
    """What the operator should look at, though the site can go on."""


class Mark(StrEnum):
    """How one link of a diagnosis stands."""

    HOLDS = "holds"
    DIFFERS = "differs"
    """A warning: somebody should look, nothing is broken."""
    BROKEN = "broken"
    NOT_REACHED = "not_reached"
    NOT_KNOWN = "not_known"
    """There is nothing here to compare with."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at, and for a warning or a failure what to do about it."""

    name: str
    mark: Mark
    about: str = ""
    advice: str = ""
