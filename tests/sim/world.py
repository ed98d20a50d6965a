"""The simulated environment: a clock, a network, signatures, and the participants.

Single-threaded; every choice comes from one seeded generator, so a seed determines the whole
history.  Knows nothing of rounds, which `site` and `byzantine_site` implement.
"""

from __future__ import annotations

import heapq
import random
import zlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from lightyear_node.protocol.events import Event, FetchFailed
from lightyear_node.protocol.parameters import Parameters
from lightyear_node.types import Digest, Hello, PeerName, Reason, SignedManifest, Update
from tests.sim.disk import Disk
from tests.sim.invariant_checker import InvariantChecker
from tests.sim.real_gossip import Answer, Message

Span = tuple[float, float]
Action = Callable[[], None]
HistoryEntry = tuple[float, PeerName, object]
Reply = Callable[[Answer], None]

REMEMBERED = 4000
"""History entries kept for the transcript of a failure."""


@dataclass
class Conditions:
    """Parameters.  Probabilities are per message, fetch, event or persistence point."""

    parameters: Parameters  # peers: all sites; each site's own parameters exclude itself
    byzantine: dict[PeerName, str] = field(default_factory=dict)  # and their behaviours
    slowness: dict[PeerName, float] = field(default_factory=dict)
    train_s: float = 10.0
    delay_s: Span = (0.05, 0.5)
    fetch_s: Span = (0.5, 3.0)
    restart_s: Span = (1.0, 40.0)
    tick_s: float = 1.0
    clock: str = "good"
    """The wall clocks: `good`, `equal` at every start, or going `back`."""
    lost: float = 0.0
    duplicated: float = 0.0
    unanswered: float = 0.0
    """Announcements that get no answer."""
    rejected: float = 0.0
    crash_at_point: float = 0.0
    crash_any_time: float = 0.0
    lost_disk: float = 0.0  # of every restart
    rolled_back: float = 0.0  # of every restart, where there is a backup
    latecomer: PeerName | None = None
    """A site missing from the others' peers.yaml at first."""
    leaver: PeerName | None = None
    """A site that the others remove from theirs."""


class Participant(Protocol):
    def receive_call(self, by: PeerName, message: Message, reply: Reply) -> None:
        """Receive a call; `reply` sends the answer, if there is one."""

    def serve(self, update: Update) -> Event: ...

    def serving_s(self) -> float | None:
        """Return how long it delays an update; None for the network's own delay."""


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
        self.trace: Callable[[HistoryEntry], None] | None = None
        self.history: deque[HistoryEntry] = deque(maxlen=REMEMBERED)
        self.cut: set[tuple[PeerName, PeerName]] = set()
        self.held: list[tuple[PeerName, PeerName, Action]] | None = None
        """If not None, messages wait here until the test delivers them."""
        self.crash_at: tuple[PeerName, str] | None = None
        """Where the next crash happens: a site and a point, for example `after P1`."""
        self.manifests: dict[Update, SignedManifest] = {}
        """Every update that its site has actually signed."""
        self.bad_updates: set[Digest] = set()
        """Updates that every site rejects."""
        self._queue: list[tuple[float, int, Action]] = []
        self._scheduled = 0

        self.names = sorted(conditions.parameters.peers)
        self.honest = [name for name in self.names if name not in conditions.byzantine]
        self.checker = InvariantChecker(
            self.names,
            self.honest,
            conditions.parameters,
            self.manifests.keys(),
            reliable_clocks=conditions.clock == "good",
        )
        self.participants: dict[PeerName, Participant] = {}

    def after(self, delay_s: float, action: Action) -> None:
        self._scheduled += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._scheduled, action))

    def run_until(self, end: float) -> None:
        queue = self._queue
        while queue and queue[0][0] < end:
            self.now, _, action = heapq.heappop(queue)
            action()
        self.now = end

    def between(self, span: Span) -> float:
        return self.random.uniform(*span)

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def wall_s(self) -> int:
        """Return a site's wall clock at its start."""
        match self.conditions.clock:
            case "equal":
                return 7
            case "back":
                return int(2000 - self.now % 1000)
        return 1_700_000_000 + int(self.now)

    def send(self, sender: PeerName, receiver: PeerName, delivery: Action) -> None:
        """Send a message, which may be lost, delayed, duplicated and reordered."""
        if self.held is not None:
            self.held.append((sender, receiver, delivery))
            return
        if (sender, receiver) in self.cut or self.chance(self.conditions.lost):
            self.counts["messages lost"] += 1
            return
        self.counts["messages"] += 1
        for _ in range(2 if self.chance(self.conditions.duplicated) else 1):
            self.after(self.between(self.conditions.delay_s), delivery)

    def ask(self, caller: PeerName, callee: PeerName, message: Message, reply: Reply) -> None:
        """Make a call whose answer returns over the same network; either may be lost."""

        def answered(answer: Answer) -> None:
            if isinstance(message, Hello) or not self.chance(self.conditions.unanswered):
                self.send(callee, caller, partial(reply, answer))

        self.send(
            caller,
            callee,
            partial(self.participants[callee].receive_call, caller, message, answered),
        )

    def fetch(self, receiver: PeerName, update: Update) -> Event:
        cut = (receiver, update.peer) in self.cut or (update.peer, receiver) in self.cut
        if cut or self.chance(self.conditions.lost):
            return FetchFailed(update, Reason.UNREACHABLE, retriable=True)
        return self.participants[update.peer].serve(update)

    def record(self, name: PeerName, what: object) -> None:
        """Append an entry to the history; it is formatted only when it is shown."""
        self.counts["events"] += 1
        entry = (self.now, name, what)
        line = f"{self.now:.3f}{name}{type(what).__name__}"
        self.fingerprint = zlib.crc32(line.encode(), self.fingerprint)
        self.history.append(entry)
        if self.trace is not None:
            self.trace(entry)
