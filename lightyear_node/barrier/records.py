"""The barrier's words: the events it is told and the commands it gives.

Records only.  `machine.Barrier` decides, the driver acts.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightyear_node.barrier.memory import Decision, Memory, Plain
from lightyear_node.barrier.terms import Cause, Terms
from lightyear_node.records import Digest, PeerName, Reason, Round, Update, Verdict

# Events: what the driver tells the barrier.


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; told at least twice a second."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A peer has answered a call of ours: a greeting, or a piece of what we fetch.

    `yours` is the newest update of our own that it has heard of, with our signature.
    """

    peer: PeerName
    yours: Update | None = None


@dataclass(frozen=True, slots=True)
class Heard:
    """A sign of life: the peer's phase, and a number that grows while it trains."""

    peer: PeerName
    phase: str = ""
    progress: int = 0


@dataclass(frozen=True, slots=True)
class Announced:
    """A peer itself has told us, signed, that it has sealed this update."""

    update: Update
    phase: str = ""
    progress: int = 0


@dataclass(frozen=True, slots=True)
class Reported:
    """A peer has heard of these updates; each is signed by the site that it names."""

    by: PeerName
    updates: tuple[Update, ...]


@dataclass(frozen=True, slots=True)
class Accused:
    """Two different updates of one round and generation, both signed by the same peer."""

    first: Update
    second: Update


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
class Reformed:
    """The federation's terms, or its members, are others from now on.

    `gone` are members that have left where the terms could not do without them: too few are left
    to go on, until an operator changes that.
    """

    terms: Terms
    gone: frozenset[PeerName] = frozenset()


# What an operator wants.


@dataclass(frozen=True, slots=True)
class Paused:
    """Complete the round, but begin no other until told to."""

    paused: bool


@dataclass(frozen=True, slots=True)
class Blocked:
    """From now on these peers, and no others, are as if they were not there."""

    peers: frozenset[PeerName]


@dataclass(frozen=True, slots=True)
class Pardoned:
    """Forget that a peer has told two stories, as far as that is known."""

    peer: PeerName


Event = (
    Tick
    | Answered
    | Heard
    | Announced
    | Reported
    | Accused
    | Fetched
    | FetchFailed
    | Trained
    | Sealed
    | Judged
    | Merged
    | Reformed
    | Paused
    | Blocked
    | Pardoned
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
class Note:
    """Make this memory durable, with a record of what has changed it."""

    kind: str
    about: Plain
    memory: Memory


@dataclass(frozen=True, slots=True)
class Accuse:
    """Persistence point 4: a peer has signed two updates of one round.  Keep both signatures."""

    first: Update
    second: Update
    memory: Memory


@dataclass(frozen=True, slots=True)
class Alarm:
    kind: str
    text: str
    peers: tuple[PeerName, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """All rounds are done.  Go on announcing and serving: slower sites need our last update."""


Command = (
    Greet
    | Train
    | Seal
    | Announce
    | Fetch
    | Judge
    | Decide
    | Merge
    | Commit
    | Note
    | Accuse
    | Alarm
    | Finish
)
