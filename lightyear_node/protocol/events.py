"""Events that the barrier handles, and commands that it returns.

Records only.  `state_machine.Barrier` decides, the event loop acts.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightyear_node.protocol.durable_state import Decision, DurableState, Plain
from lightyear_node.protocol.parameters import Cause, Parameters
from lightyear_node.types import Digest, PeerName, Reason, Round, Update, Verdict

# Events: input of the barrier.


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; sent at least twice per second."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A peer has answered one of our calls: a greeting, or a chunk of a download.

    `yours` is the newest update signed by us that the peer knows.
    """

    peer: PeerName
    yours: Update | None = None


@dataclass(frozen=True, slots=True)
class Heard:
    """A sign of life: the peer's phase, and a counter that grows while it trains."""

    peer: PeerName
    phase: str = ""
    progress: int = 0


@dataclass(frozen=True, slots=True)
class Announced:
    """A peer has announced its own signed update."""

    update: Update
    phase: str = ""
    progress: int = 0


@dataclass(frozen=True, slots=True)
class Reported:
    """A peer vouches for these updates; each is signed by the site that made it."""

    by: PeerName
    updates: tuple[Update, ...]


@dataclass(frozen=True, slots=True)
class Accused:
    """Two different updates for one round and generation, both signed by the same peer."""

    first: Update
    second: Update


@dataclass(frozen=True, slots=True)
class Fetched:
    """The bytes are in our store and match the announced digest."""

    update: Update


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """`retriable` is false if these bytes can never become valid."""

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
class Reconfigured:
    """The barrier's parameters or the members have changed.

    `removed` are members that have left although the parameters still need them: rounds wait until
    an operator changes the parameters.
    """

    parameters: Parameters
    removed: frozenset[PeerName] = frozenset()


# Operator commands.


@dataclass(frozen=True, slots=True)
class Paused:
    """Pause after the current round, or resume."""

    paused: bool


@dataclass(frozen=True, slots=True)
class Blocked:
    """Exclude these peers, and no others, from now on."""

    peers: frozenset[PeerName]


@dataclass(frozen=True, slots=True)
class Unquarantined:
    """Include a quarantined peer again; the evidence known so far no longer counts."""

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
    | Reconfigured
    | Paused
    | Blocked
    | Unquarantined
)

# Commands: output of the barrier, to be executed in order.  A command with a `memory` is executed
# by making that state durable, before the next command and before the event that answers it.


@dataclass(frozen=True, slots=True)
class Greet:
    """Send a greeting to every peer; `Answered` for each reply."""


@dataclass(frozen=True, slots=True)
class Train:
    """Answered by `Trained`."""

    round: Round


@dataclass(frozen=True, slots=True)
class Seal:
    """Persistence point 1; answered by `Sealed`."""

    update: Update
    memory: DurableState


@dataclass(frozen=True, slots=True)
class Announce:
    """Send a heartbeat with our newest sealed update, if any, to every peer."""

    update: Update | None


@dataclass(frozen=True, slots=True)
class Fetch:
    """Answered by exactly one `Fetched` or `FetchFailed`, after any time."""

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
    memory: DurableState


@dataclass(frozen=True, slots=True)
class Merge:
    """Answered by `Merged`.  Repeated after a crash: the result must be the same."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class Commit:
    """Persistence point 3: the round is over; the next training starts from `model`."""

    round: Round
    model: Digest
    memory: DurableState


@dataclass(frozen=True, slots=True)
class Note:
    """Make this state durable, with a record of what has changed it."""

    kind: str
    about: Plain
    memory: DurableState


@dataclass(frozen=True, slots=True)
class Accuse:
    """Persistence point 4: a peer signed two updates for one round.  Keep both signatures."""

    first: Update
    second: Update
    memory: DurableState


@dataclass(frozen=True, slots=True)
class Alarm:
    kind: str
    text: str
    peers: tuple[PeerName, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """All rounds are done.  Keep announcing and serving: slower sites need our last update."""


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
