"""What a site's barrier remembers through a crash, and how the journal writes it down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lightyear_node.barrier.terms import Cause
from lightyear_node.records import Generation, PeerName, Reason, Round, Update, Verdict

Plain = dict[str, Any]
Age = tuple[Generation, Round]


@dataclass(frozen=True, slots=True)
class Decision:
    """How a round was closed here: final once it is journaled, and merged as it stands.

    `accepted` is what is merged, in the order of merging; `verdicts` has a line for every peer, so
    also for those that delivered nothing.
    """

    round: Round
    cause: Cause
    why: str
    accepted: tuple[Update, ...]
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """All that must survive a crash.

    `round` is the one being worked on, `announced` our newest sealed update, `decision` one that is
    not committed yet, `used` the newest update of each peer that was ever merged here.
    """

    generation: Generation
    round: Round
    announced: Update | None = None
    decision: Decision | None = None
    used: Mapping[PeerName, Age] = field(default_factory=dict)
    recovering: bool = False
    """What we have said before is not known, or not all of it: nothing is said until we have
    asked the others.  Durable, so that a crash meanwhile does not look like a clean start."""
    vouched: Mapping[PeerName, tuple[Update, ...]] = field(default_factory=dict)
    """The updates of others that we have told others of: of a round never two."""
    generations: Mapping[PeerName, tuple[Generation, Round]] = field(default_factory=dict)
    """Each peer's newest generation, and the round before which it is on probation."""
    quarantined: Mapping[PeerName, Age] = field(default_factory=dict)
    """Who has told two stories, and about which update."""
    pardoned: Mapping[PeerName, Age] = field(default_factory=dict)
    """Whom an operator has forgiven, for what was known until then."""
    blocked: frozenset[PeerName] = frozenset()
    """Whom an operator does not want to work with."""
    paused: bool = False

    def to_plain(self) -> Plain:
        """As JSON types, for the journal."""
        return {
            "generation": self.generation,
            "round": self.round,
            "announced": _plain(self.announced) if self.announced else None,
            "decision": asdict(self.decision) if self.decision else None,
            "used": _lists(self.used),
            "recovering": self.recovering,
            "vouched": {
                peer: [_plain(update) for update in known] for peer, known in self.vouched.items()
            },
            "generations": _lists(self.generations),
            "quarantined": _lists(self.quarantined),
            "pardoned": _lists(self.pardoned),
            "blocked": sorted(self.blocked),
            "paused": self.paused,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Memory:
        """What an earlier version did not know yet may be missing."""
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
            pardoned=_pairs(plain.get("pardoned", {})),
            blocked=frozenset(plain.get("blocked", ())),
            paused=plain.get("paused", False),
        )


def _plain(update: Update) -> Plain:
    # As `asdict` would; it copies deeply, and this is written with every persistence point.
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
