"""The barrier's words: its terms, its memory, the events it is told and the commands it gives.

Records only.  `machine.Barrier` decides, the driver acts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from lightyear_node.records import Digest, Generation, PeerName, Reason, Round, Update, Verdict

Plain = dict[str, Any]
Age = tuple[Generation, Round]


class Phase(StrEnum):
    OBSERVING = "observing"
    TRAINING = "training"
    SEALING = "sealing"
    COLLECTING = "collecting"
    JUDGING = "judging"
    MERGING = "merging"
    FINISHED = "finished"


class Cause(StrEnum):
    """Which rule closed a round."""

    ALL = "all"
    GRACE = "grace"
    OVERTAKEN = "overtaken"


class Standing(StrEnum):
    """What the round being collected may still expect of a peer."""

    DELIVERED = "delivered"
    AWAITED = "awaited"
    LAGGING = "lagging"
    SILENT = "silent"
    REFUSED = "refused"
    EXCLUDED = "excluded"


@dataclass(frozen=True, slots=True)
class Terms:
    """The barrier's part of peers.yaml, already validated; `peers` is everybody but ourselves.

    A site that trains alone has no peers, and needs none.
    """

    peers: frozenset[PeerName]
    min_peers: int
    faulty_max: int
    rounds: int
    grace_s: float = 30.0
    deadline_s: float = 0.0
    heartbeat_s: float = 5.0
    suspect_s: float = 20.0
    observe_s: float = 5.0
    degraded_s: float = 60.0
    lag_rounds: int = 3


def admissible_min_peers(sites: int, faulty_max: int) -> range:
    """The values of min_peers that are both safe and live; none when there are too few sites.

    With more than sites - 1 - faulty_max, silent sites could block the rest.  With fewer than
    2 * faulty_max, two groups could drift apart for good: whoever advances must leave
    faulty_max + 1 honest sites at its round or beyond, for they pull the others up.
    """
    if faulty_max < 0 or sites < 3 * faulty_max + 1:
        return range(0)
    return range(max(1, 2 * faulty_max), sites - faulty_max)


def default_faulty_max(sites: int) -> int:
    return 1 if sites >= 4 else 0


def default_min_peers(sites: int, faulty_max: int) -> int:
    """Half of the peers, as far as that is admissible."""
    admissible = admissible_min_peers(sites, faulty_max)
    if not admissible:
        raise ValueError(f"{sites} sites cannot tolerate {faulty_max} faulty ones")
    return min(max(sites // 2, admissible[0]), admissible[-1])


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

    def to_plain(self) -> Plain:
        """As JSON types, for the journal."""
        return {
            "generation": self.generation,
            "round": self.round,
            "announced": asdict(self.announced) if self.announced else None,
            "decision": asdict(self.decision) if self.decision else None,
            "used": {peer: list(age) for peer, age in self.used.items()},
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Memory:
        announced, decision = plain["announced"], plain["decision"]
        return cls(
            generation=plain["generation"],
            round=plain["round"],
            announced=Update(**announced) if announced else None,
            decision=_decision(decision) if decision else None,
            used={peer: (age[0], age[1]) for peer, age in plain["used"].items()},
        )


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


# Events: what the driver tells the barrier.


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; told at least twice a second."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A peer has answered a call of ours: a greeting, or a piece of what we fetch."""

    peer: PeerName


@dataclass(frozen=True, slots=True)
class Heard:
    """A sign of life; `at_work` if the peer says that it is training."""

    peer: PeerName
    at_work: bool = False


@dataclass(frozen=True, slots=True)
class Announced:
    """A peer itself has told us, signed, that it has sealed this update."""

    update: Update
    at_work: bool = False


@dataclass(frozen=True, slots=True)
class Fetched:
    """The bytes are in our store and are what the announcement said."""

    update: Update


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """Not `retriable` means that these very bytes can never be right."""

    update: Update
    reason: Reason
    retriable: bool


@dataclass(frozen=True, slots=True)
class Trained:
    digest: Digest


@dataclass(frozen=True, slots=True)
class Sealed:
    update: Update


@dataclass(frozen=True, slots=True)
class Judged:
    round: Round
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True, slots=True)
class Merged:
    round: Round
    model: Digest


@dataclass(frozen=True, slots=True)
class Excluded:
    """From now on these peers, and no others, are as if they were not there."""

    peers: frozenset[PeerName]


Event = (
    Tick
    | Answered
    | Heard
    | Announced
    | Fetched
    | FetchFailed
    | Trained
    | Sealed
    | Judged
    | Merged
    | Excluded
)

# Commands: what the barrier tells the driver, to be carried out in order.  A command that carries a
# `memory` is carried out by making that memory durable, before the next command and before the
# event that answers it.


@dataclass(frozen=True, slots=True)
class Greet:
    """Say hello to every peer; `Answered` for each that replies."""


@dataclass(frozen=True, slots=True)
class Train:
    """Answered by `Trained`."""

    round: Round


@dataclass(frozen=True, slots=True)
class Seal:
    """Persistence point 1; answered by `Sealed`."""

    update: Update
    memory: Memory


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell every peer that we live, and our newest sealed update if there is one."""

    update: Update | None


@dataclass(frozen=True, slots=True)
class Fetch:
    """Answered by one `Fetched` or `FetchFailed`, however long it takes."""

    update: Update


@dataclass(frozen=True, slots=True)
class Judge:
    """The round is closed; answered by `Judged` with one verdict for each of `updates`."""

    round: Round
    updates: tuple[Update, ...]
    missing: tuple[tuple[PeerName, Reason], ...]
    cause: Cause
    why: str


@dataclass(frozen=True, slots=True)
class Decide:
    """Persistence point 2."""

    decision: Decision
    memory: Memory


@dataclass(frozen=True, slots=True)
class Merge:
    """Answered by `Merged`.  After a crash it is given again: the result must be the same."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class Commit:
    """Persistence point 3: the round is over and `model` is what we go on with."""

    round: Round
    model: Digest
    memory: Memory


@dataclass(frozen=True, slots=True)
class Alarm:
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """All rounds are done.  Go on announcing and serving: slower sites need our last update."""


Command = Greet | Train | Seal | Announce | Fetch | Judge | Decide | Merge | Commit | Alarm | Finish
