"""The journal's memory as typed values: what a restart reads.

The journal stores JSON under the keys of `from_plain`; `round_journal` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from lightyear_node.protocol.durable_state import DurableState
from lightyear_node.types import (
    Digest,
    Evidence,
    Generation,
    Opinion,
    PeerName,
    Round,
    SignedHead,
    SignedManifest,
    Worth,
)


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The files that training a round has produced, by digest.

    `own` is the trained model; `outgoing` is sent to peers and differs only if it was rounded;
    `carry` is the optimizer's state.
    """

    own: Digest
    outgoing: Digest
    carry: Digest
    raw_bytes: int
    samples: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class BestModel:
    """The merged model with the lowest loss on this site's validation data."""

    model: Digest
    round: int
    loss: float


@dataclass(frozen=True, slots=True)
class JournalMemory:
    """Everything that a restart reads from the journal's memory."""

    barrier: DurableState
    seen: list[SignedManifest]
    evidence: dict[PeerName, Evidence]
    schema: Digest | None
    dtype: str
    models: list[Digest]
    best: BestModel | None
    offered: list[Digest]
    rule: str | None
    rule_state: Mapping[str, Any]
    worth: Worth | None
    work: TrainingResult | None
    manifest: SignedManifest | None
    witnessed: dict[PeerName, SignedHead]
    opinions: dict[PeerName, Opinion]
    opinions_on_us: dict[PeerName, Opinion]

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Read the memory; keys that earlier versions did not write may be missing."""
        # An empty journal belongs to a new site or to one that lost its state: peers know which.
        barrier = (
            DurableState.from_plain(plain["barrier"])
            if plain.get("barrier")
            else DurableState(Generation(0), Round(0), recovering=True)
        )
        evidence = plain.get("evidence", {})
        witnessed = plain.get("witnessed", {})
        manifest = plain.get("manifest")
        return cls(
            barrier=barrier,
            seen=[SignedManifest.from_plain(signed) for signed in plain.get("seen", [])],
            evidence={peer: Evidence.from_plain(proof) for peer, proof in evidence.items()},
            schema=plain.get("schema"),
            dtype=plain.get("dtype", "float32"),
            models=plain.get("models", []),
            best=BestModel(**plain["best"]) if plain.get("best") else None,
            offered=plain.get("offered", []),
            rule=plain.get("rule"),
            rule_state=plain.get("rule_state", {}),
            worth=Worth.from_plain(plain["worth"]) if plain.get("worth") else None,
            work=TrainingResult(**plain["work"]) if plain.get("work") else None,
            manifest=SignedManifest.from_plain(manifest) if manifest else None,
            witnessed={peer: SignedHead.from_plain(head) for peer, head in witnessed.items()},
            opinions=opinions_from_plain(plain.get("opinions", {})),
            opinions_on_us=opinions_from_plain(plain.get("told", {})),
        )


def opinions_to_plain(opinions: Mapping[PeerName, Opinion]) -> dict[str, Any]:
    return {peer: asdict(opinion) for peer, opinion in opinions.items()}


def opinions_from_plain(plain: Mapping[str, Any]) -> dict[PeerName, Opinion]:
    return {PeerName(peer): Opinion(**opinion) for peer, opinion in plain.items()}


def heads_to_plain(heads: Mapping[PeerName, SignedHead]) -> dict[str, Any]:
    return {peer: head.to_plain() for peer, head in heads.items()}
