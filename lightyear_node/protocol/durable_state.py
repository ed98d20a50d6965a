"""What must survive a crash, and its form in the journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lightyear_node.protocol.parameters import Cause
from lightyear_node.types import Generation, PeerName, Reason, Round, Update, Verdict

Plain = dict[str, Any]
Age = tuple[Generation, Round]


@dataclass(frozen=True, slots=True)
class Decision:
    """How a round was closed; final once it is in the journal.

    `accepted` is merged in this order; `verdicts` has one entry for every peer, including those
    that delivered nothing.
    """

    round: Round
    cause: Cause
    why: str
    accepted: tuple[Update, ...]
    verdicts: tuple[Verdict, ...]

    def to_plain(self) -> Plain:
        """Return JSON types, without the verdicts' details: earlier versions refuse unknown keys.

        The journal has the details beside the decision.
        """
        plain = asdict(self)
        for verdict in plain["verdicts"]:
            del verdict["details"]
        return plain


@dataclass(frozen=True, slots=True)
class DurableState:
    """The state of a barrier that must survive a crash.

    `round` is the current round, `announced` our newest sealed update, `decision` a decision that
    is not committed yet, `used` the newest update of each peer that was merged here.
    """

    generation: Generation
    round: Round
    announced: Update | None = None
    decision: Decision | None = None
    used: Mapping[PeerName, Age] = field(default_factory=dict)
    recovering: bool = False
    """Whether we may have announced updates that are not in this state; nothing is announced until
    enough peers have answered.  Durable, so that a crash meanwhile does not look like a clean
    start."""
    vouched: Mapping[PeerName, tuple[Update, ...]] = field(default_factory=dict)
    """The peers' updates that we vouch for: at most one per peer and round."""
    generations: Mapping[PeerName, tuple[Generation, Round]] = field(default_factory=dict)
    """Each peer's newest generation, and the round before which it is on probation."""
    quarantined: Mapping[PeerName, Age] = field(default_factory=dict)
    """Peers that signed two updates for one round, with the generation and round."""
    unquarantined: Mapping[PeerName, Age] = field(default_factory=dict)
    """Peers that an operator unquarantined, with the age up to which evidence is ignored.  The
    journal calls this `pardoned`."""
    blocked: frozenset[PeerName] = frozenset()
    """Peers that an operator has excluded."""
    paused: bool = False

    def to_plain(self) -> Plain:
        """Return JSON types for the journal."""
        return {
            "generation": self.generation,
            "round": self.round,
            "announced": _plain(self.announced) if self.announced else None,
            "decision": self.decision.to_plain() if self.decision else None,
            "used": _lists(self.used),
            "recovering": self.recovering,
            "vouched": {
                peer: [_plain(update) for update in known] for peer, known in self.vouched.items()
            },
            "generations": _lists(self.generations),
            "quarantined": _lists(self.quarantined),
            "pardoned": _lists(self.unquarantined),
            "blocked": sorted(self.blocked),
            "paused": self.paused,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> DurableState:
        """Read what `to_plain` wrote; keys that earlier versions did not have may be missing."""
        announced, decision = plain["announced"], plain["decision"]
        return cls(
            generation=plain["generation"],
            round=plain["round"],
            announced=Update(**announced) if announced else None,
            decision=_decision(decision) if decision else None,
            used=_pairs(plain["used"]),
            recovering=plain.get("recovering", False),
            vouched={
                peer: tuple(Update(**update) for update in known)
                for peer, known in plain.get("vouched", {}).items()
            },
            generations=_pairs(plain.get("generations", {})),
            quarantined=_pairs(plain.get("quarantined", {})),
            unquarantined=_pairs(plain.get("pardoned", {})),
            blocked=frozenset(plain.get("blocked", ())),
            paused=plain.get("paused", False),
        )


def _plain(update: Update) -> Plain:
    # Like `asdict`, but without its deep copy: this runs at every persistence point.
    return {
        "peer": update.peer,
        "generation": update.generation,
        "round": update.round,
        "digest": update.digest,
    }


def _lists(pairs: Mapping[PeerName, Age]) -> dict[str, list[int]]:
    return {peer: list(pair) for peer, pair in pairs.items()}


def _pairs(lists: Mapping[PeerName, list[Any]]) -> dict[PeerName, Age]:
    return {peer: (first, second) for peer, (first, second) in lists.items()}


def _decision(plain: Mapping[str, Any]) -> Decision:
    return Decision(
        round=plain["round"],
        cause=Cause(plain["cause"]),
        why=plain["why"],
        accepted=tuple(Update(**update) for update in plain["accepted"]),
        verdicts=tuple(
            Verdict(**{**verdict, "reason": Reason(verdict["reason"])})
            for verdict in plain["verdicts"]
        ),
    )
