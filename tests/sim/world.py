"""A simulated federation: a clock, a network, signatures, and the sites that live in it.

Everything happens in one thread and every choice comes from one seeded generator, so a seed is a
whole history.  The world knows no rounds: `site` and `liar` are what happens in it.
"""

from __future__ import annotations

import heapq
import random
import zlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from lightyear_node.barrier import Event, FetchFailed, Terms
from lightyear_node.records import PeerName, Reason, Update
from tests.sim.disk import Disk
from tests.sim.referee import Referee

Span = tuple[float, float]
Happening = Callable[[], None]
Told = tuple[float, PeerName, object]

REMEMBERED = 4000
"""Lines of history that are kept for the transcript of a failure."""


@dataclass
class Conditions:
    """What a world is like.  Probabilities are per message, fetch, event or persistence point."""

    terms: Terms  # its peers are all the sites; each site's own terms leave itself out
    liars: dict[PeerName, str] = field(default_factory=dict)  # and their habits
    slowness: dict[PeerName, float] = field(default_factory=dict)
    train_s: float = 10.0
    delay_s: Span = (0.05, 0.5)
    fetch_s: Span = (0.5, 3.0)
    restart_s: Span = (1.0, 40.0)
    tick_s: float = 1.0
    clock: str = "good"
    """Of the walls: `good`, `equal` at every start, or going `back`."""
    lost: float = 0.0
    duplicated: float = 0.0
    unanswered: float = 0.5
    """Announcements whose answer never comes.  An answer says what the next one would, too."""
    rejected: float = 0.0
    crash_at_point: float = 0.0
    crash_any_time: float = 0.0
    lost_disk: float = 0.0  # of every restart
    rolled_back: float = 0.0  # of every restart, where there is a backup
    latecomer: PeerName | None = None
    """Whom the others' peers.yaml does not know of at first."""
    leaver: PeerName | None = None
    """Whom the others strike out of theirs."""


@dataclass(frozen=True, slots=True)
class Message:
    """What a site tells another: an announcement, a greeting, or the answer to either."""

    by: PeerName
    update: Update | None
    phase: str
    progress: int
    seen: tuple[Update, ...] = ()
    evidence: tuple[tuple[Update, Update], ...] = ()
    yours: Update | None = None
    """The newest update of the receiver's own that the sender holds; only between greetings."""


class Participant(Protocol):
    def greeted(self, message: Message) -> None: ...

    def answered(self, message: Message) -> None:
        """Its greeting is."""

    def announced(self, message: Message) -> None: ...

    def replied(self, message: Message) -> None:
        """To its announcement."""

    def serve(self, update: Update) -> Event: ...


class World:
    def __init__(
        self, conditions: Conditions, seed: int | str, new_disk: Callable[[], Disk] = Disk
    ) -> None:
        self.conditions = conditions
        self.random = random.Random(seed)
        self.new_disk = new_disk
        self.now = 1000.0
        self.counts: Counter[str] = Counter()
        self.fingerprint = 0
        self.trace: Callable[[Told], None] | None = None
        self.history: deque[Told] = deque(maxlen=REMEMBERED)
        self.cut: set[tuple[PeerName, PeerName]] = set()
        self.held: list[tuple[PeerName, PeerName, Happening]] | None = None
        """If not None, messages wait here until somebody delivers them by hand."""
        self.crash_at: tuple[PeerName, str] | None = None
        """Where the next crash is to be: a site, and for example `after P1`."""
        self.signed: set[Update] = set()
        """Every update that the site it names has really signed."""
        self._queue: list[tuple[float, int, Happening]] = []
        self._scheduled = 0

        self.names = sorted(conditions.terms.peers)
        self.honest = [name for name in self.names if name not in conditions.liars]
        self.referee = Referee(
            self.names,
            self.honest,
            conditions.terms,
            self.signed,
            reliable_clocks=conditions.clock == "good",
        )
        self.participants: dict[PeerName, Participant] = {}

    def after(self, delay_s: float, happening: Happening) -> None:
        self._scheduled += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._scheduled, happening))

    def run_until(self, end: float) -> None:
        queue = self._queue
        while queue and queue[0][0] < end:
            self.now, _, happening = heapq.heappop(queue)
            happening()
        self.now = end

    def between(self, span: Span) -> float:
        return self.random.uniform(*span)

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def wall_s(self) -> int:
        """What the clock on a site's wall says at a start."""
        match self.conditions.clock:
            case "equal":
                return 7
            case "back":
                return int(2000 - self.now % 1000)
        return 1_700_000_000 + int(self.now)

    def send(self, sender: PeerName, receiver: PeerName, delivery: Happening) -> None:
        """A message may be lost, late, doubled and out of order."""
        if self.held is not None:
            self.held.append((sender, receiver, delivery))
            return
        if (sender, receiver) in self.cut or self.chance(self.conditions.lost):
            self.counts["messages lost"] += 1
            return
        self.counts["messages"] += 1
        for _ in range(2 if self.chance(self.conditions.duplicated) else 1):
            self.after(self.between(self.conditions.delay_s), delivery)

    def fetch(self, receiver: PeerName, update: Update) -> Event:
        cut = (receiver, update.peer) in self.cut or (update.peer, receiver) in self.cut
        if cut or self.chance(self.conditions.lost):
            return FetchFailed(update, Reason.UNREACHABLE, retriable=True)
        return self.participants[update.peer].serve(update)

    def note(self, name: PeerName, what: object) -> None:
        """One line of history, in words only if somebody reads it."""
        self.counts["events"] += 1
        told = (self.now, name, what)
        line = f"{self.now:.3f}{name}{type(what).__name__}"
        self.fingerprint = zlib.crc32(line.encode(), self.fingerprint)
        self.history.append(told)
        if self.trace is not None:
            self.trace(told)
