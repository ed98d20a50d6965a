"""A simulated federation: a clock, a network, disks, and sites that run real barriers.

Everything happens in one thread and every choice comes from one seeded generator, so a seed is a
whole history.  A `Site` is what the driver is in the product: it carries out commands and tells the
barrier what came of them.  It can be killed before and after every persistence point.
"""

from __future__ import annotations

import heapq
import json
import random
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from lightyear_node.barrier import (
    Accuse,
    Accused,
    Alarm,
    Announce,
    Announced,
    Answered,
    Barrier,
    Blocked,
    Command,
    Commit,
    Decide,
    Event,
    Fetch,
    Fetched,
    FetchFailed,
    Finish,
    Greet,
    Heard,
    Judge,
    Judged,
    Memory,
    Merge,
    Merged,
    Note,
    Pardoned,
    Paused,
    Phase,
    Reported,
    Seal,
    Sealed,
    Terms,
    Tick,
    Train,
    Trained,
)
from lightyear_node.records import Digest, Generation, PeerName, Reason, Round, Update, Verdict
from tests.sim.referee import Referee

TICK_S = 1.0
Span = tuple[float, float]
Happening = Callable[[], None]


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
    lost_disk: float = 0.0  # of every restart
    lost: float = 0.0
    duplicated: float = 0.0
    rejected: float = 0.0
    crash_at_point: float = 0.0
    crash_any_time: float = 0.0


class Crash(Exception):
    """A site is killed in the middle of what it is doing."""


class World:
    def __init__(self, conditions: Conditions, seed: int) -> None:
        self.conditions = conditions
        self.random = random.Random(seed)
        self.now = 1000.0
        self.counts: Counter[str] = Counter()
        self.fingerprint = 0
        self.trace: Callable[[str], None] | None = None
        self.cut: set[tuple[PeerName, PeerName]] = set()
        self._queue: list[tuple[float, int, Happening]] = []
        self._scheduled = 0

        self.wall_s: dict[PeerName, int] = {}
        """What each site's wall clock says when it begins without a memory: anything."""
        self.signed: set[Update] = set()
        """Every update that the site it names has really signed."""

        self.names = sorted(conditions.terms.peers)
        honest = [name for name in self.names if name not in conditions.liars]
        terms = conditions.terms
        self.referee = Referee(self.names, honest, terms.min_peers, terms.faulty_max)
        self.sites = {name: Site(name, self) for name in honest}
        self.liars = {name: Liar(name, self) for name in conditions.liars}

    def after(self, delay_s: float, happening: Happening) -> None:
        self._scheduled += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._scheduled, happening))

    def run_until(self, end: float) -> None:
        while self._queue and self._queue[0][0] < end:
            self.now, _, happening = heapq.heappop(self._queue)
            happening()
        self.now = end

    def between(self, span: Span) -> float:
        return self.random.uniform(*span)

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def participant(self, name: PeerName) -> Site | Liar:
        return self.sites.get(name) or self.liars[name]

    def send(self, sender: PeerName, receiver: PeerName, delivery: Happening) -> None:
        """A message may be lost, late, doubled and out of order."""
        if (sender, receiver) in self.cut or self.chance(self.conditions.lost):
            self.counts["messages lost"] += 1
            return
        for _ in range(2 if self.chance(self.conditions.duplicated) else 1):
            self.after(self.between(self.conditions.delay_s), delivery)

    def fetch(self, receiver: PeerName, update: Update) -> Event:
        cut = (receiver, update.peer) in self.cut or (update.peer, receiver) in self.cut
        if cut or self.chance(self.conditions.lost):
            return FetchFailed(update, Reason.UNREACHABLE, retriable=True)
        return self.participant(update.peer).serve(update)

    def note(self, name: PeerName, what: object) -> None:
        """One line of history: in the fingerprint always, in full if somebody is reading."""
        self.counts["events"] += 1
        line = f"{self.now:.3f} {name} {type(what).__name__}"
        self.fingerprint = zlib.crc32(line.encode(), self.fingerprint)
        if self.trace is not None:
            self.trace(f"{self.now:10.3f} {name} {what}")


class Site:
    """An honest site: a disk that survives, and a process that may not."""

    def __init__(self, name: PeerName, world: World) -> None:
        self.name = name
        self.world = world
        self.referee = world.referee
        self.others = [peer for peer in world.names if peer != name]
        self.barrier: Barrier | None = None
        self.paused = False
        self.longest_wait_s = 0.0
        self._life = 0
        self._buried = False
        self._missed: list[Happening] = []
        self._sealed_at: float | None = None
        # The disk: the journal's memory, whom the operator has blocked, our two last updates, and
        # what we have fetched.
        self.memory = json.dumps(Memory(Generation(0), Round(0)).to_plain())
        self.excluded: frozenset[PeerName] = frozenset()
        self._served: tuple[Update, ...] = ()
        self._fetched: dict[PeerName, Update] = {}

    # Life and death.

    def boot(self) -> None:
        if self.barrier is not None or self._buried:
            return
        memory = Memory.from_plain(json.loads(self.memory))
        terms = replace(self.world.conditions.terms, peers=frozenset(self.others))
        self.barrier = Barrier(self.name, terms, memory, self.excluded)
        self.referee.boots(self.name, self.barrier, self.excluded)
        self._schedule(TICK_S, self._tick)
        self._or_die(self._start)

    def kill(self) -> None:
        """Nothing remains but the disk."""
        self.barrier = None
        self.paused = False
        self._sealed_at = None
        self._missed.clear()
        self._life += 1

    def crash(self) -> None:
        if self.barrier is not None:
            self.kill()
            self.world.counts["crashes"] += 1
            self.world.after(self.world.between(self.world.conditions.restart_s), self.boot)

    def bury(self) -> None:
        """Killed for good."""
        self.kill()
        self._buried = True

    def pause(self) -> None:
        self.paused = self.barrier is not None

    def resume(self) -> None:
        self.paused = False
        missed, self._missed = self._missed, []
        for happening in missed:
            happening()

    # What a site is told.

    def tell(self, event: Event) -> None:
        self._when_awake(lambda: self._tell(event))

    def exclude(self, peers: frozenset[PeerName]) -> None:
        self.excluded = peers
        self.tell(Excluded(peers))

    def greeted(self, by: PeerName) -> None:
        self._when_awake(lambda: self._answer(by))

    def answered(self, by: PeerName, update: Update | None, at_work: bool) -> None:
        self.tell(Answered(by))
        self.announced(by, update, at_work)

    def announced(self, by: PeerName, update: Update | None, at_work: bool) -> None:
        self.tell(Announced(update, at_work) if update else Heard(by, at_work))

    def serve(self, update: Update) -> Event:
        if self.barrier is None or self.paused or update not in self._served:
            return FetchFailed(update, Reason.UNREACHABLE, retriable=True)
        return Fetched(update)

    def _when_awake(self, happening: Happening) -> None:
        """Dead sites miss what happens; stopped ones get to it when they wake up."""
        if self.paused:
            self._missed.append(self._in_this_life(happening))
        elif self.barrier is not None:
            happening()

    def _tell(self, event: Event) -> None:
        assert self.barrier is not None
        if self.world.chance(self.world.conditions.crash_any_time):
            self.crash()
            return
        self.world.note(self.name, event)
        self.referee.tells(self.name, event)
        if isinstance(event, Sealed):
            self._sealed_at = self.world.now
        handle = self.barrier.handle
        self._or_die(lambda: self._carry_out(handle(event, self.world.now)))

    def _answer(self, by: PeerName) -> None:
        assert self.barrier is not None
        update = self.barrier.announced
        if update is not None:
            self.referee.shows(self.name, update)
        answered = self.world.participant(by).answered
        self.world.send(self.name, by, partial(answered, self.name, update, self._at_work()))

    def _at_work(self) -> bool:
        return self.barrier is not None and self.barrier.phase is Phase.TRAINING

    def _start(self) -> None:
        assert self.barrier is not None
        self._persist("P0", None)
        self._carry_out(self.barrier.start(self.world.now))

    def _or_die(self, act: Happening) -> None:
        try:
            act()
        except Crash:
            self.crash()
        if self.barrier is not None:
            self.referee.steps(self.name, self.barrier)

    def _in_this_life(self, happening: Happening) -> Happening:
        life = self._life
        return lambda: happening() if self._life == life else None

    def _schedule(self, delay_s: float, happening: Happening) -> None:
        self.world.after(delay_s, self._in_this_life(happening))

    def _tick(self) -> None:
        self._schedule(TICK_S, self._tick)
        if not self.paused:
            self.tell(Tick())

    # What a site does.

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            self.world.note(self.name, command)
            self._do(command)

    def _do(self, command: Command) -> None:
        world = self.world
        match command:
            case Greet():
                for name in self.others:
                    greeted = world.participant(name).greeted
                    world.send(self.name, name, partial(greeted, self.name))
            case Train():
                seconds = world.conditions.train_s * world.conditions.slowness.get(self.name, 1.0)
                digest = Digest(f"{self.name}/{world.random.getrandbits(64):016x}")
                self._later(seconds * world.between((0.8, 1.2)), Trained(digest))
            case Seal(update, memory):
                self.referee.seals(self.name, update)
                self._persist("P1", memory)
                self._later(0.01, Sealed(update))
            case Announce(update):
                self._announce(update)
            case Fetch(update):
                self._schedule(world.between(world.conditions.fetch_s), lambda: self._fetch(update))
            case Judge():
                self.referee.closes(self.name, command)
                if self._sealed_at is not None:
                    self.longest_wait_s = max(self.longest_wait_s, world.now - self._sealed_at)
                verdicts = tuple(self._verdict(update) for update in command.updates)
                self._later(world.between((0.1, 2.0)), Judged(command.round, verdicts))
            case Decide(_, memory):
                self._persist("P2", memory)
            case Merge(decision):
                self.referee.merges(self.name, decision)
                model = Digest(f"merge of {len(decision.accepted)}")
                self._later(world.between((0.1, 1.0)), Merged(decision.round, model))
            case Commit(round, _, memory):
                self._persist("P3", memory, lambda: self.referee.commits(self.name, round))
            case Alarm(kind):
                world.counts[f"alarms: {kind}"] += 1
            case Finish():
                world.counts["finishes"] += 1

    def _later(self, delay_s: float, event: Event) -> None:
        self._schedule(delay_s, lambda: self.tell(event))

    def _persist(self, point: str, memory: Memory | None, durable: Happening | None = None) -> None:
        self._may_crash(f"before {point}")
        if memory is not None:
            self.memory = json.dumps(memory.to_plain())
            if memory.announced is not None and memory.announced not in self._served:
                self._served = (*self._served[-1:], memory.announced)
        if durable is not None:
            durable()
        self._may_crash(f"after {point}")

    def _may_crash(self, where: str) -> None:
        if self.world.chance(self.world.conditions.crash_at_point):
            self.world.counts[f"crashes {where}"] += 1
            raise Crash

    def _announce(self, update: Update | None) -> None:
        if update is not None:
            self.referee.shows(self.name, update)
        for name in self.others:
            announced = self.world.participant(name).announced
            message = partial(announced, self.name, update, self._at_work())
            self.world.send(self.name, name, message)

    def _fetch(self, update: Update) -> None:
        known = self._fetched.get(update.peer) == update
        event = Fetched(update) if known else self.world.fetch(self.name, update)
        if isinstance(event, Fetched):
            self._fetched[update.peer] = update
        self.tell(event)

    def _verdict(self, update: Update) -> Verdict:
        if self.world.chance(self.world.conditions.rejected):
            return Verdict(update.peer, False, Reason.AGREEMENT_BELOW_TAU, score=0.1)
        return Verdict(update.peer, True, Reason.OK, score=0.9, weight=1.0)


class Liar:
    """A site with a valid certificate that says whatever its habit is, at any time."""

    HABITS = ("silent", "future", "stale", "split", "reborn", "fickle")

    def __init__(self, name: PeerName, world: World) -> None:
        self.name = name
        self.world = world
        self.habit = world.conditions.liars[name]
        self._highest = Round(0)
        self._generation = Generation(0)

    def act(self) -> None:
        self.world.after(self.world.between((0.5, 10.0)), self.act)
        habit = self.habit
        if habit == "fickle":
            habit = self.world.random.choice(self.HABITS[:-1])
        if habit == "silent":
            return
        ahead = self.world.random.choice((1, 2, 10, 10**9))
        round = {"future": self._highest + ahead, "stale": max(0, self._highest - 5)}.get(
            habit, self._highest + self.world.random.randint(0, 1)
        )
        if habit == "reborn":
            self._generation = Generation(self._generation + 1)
        for index, site in enumerate(self.world.sites.values()):
            face = index % 2 if habit == "split" else 0
            digest = Digest(f"{self.name}/{round}/{face}")
            update = Update(self.name, self._generation, Round(round), digest)
            # It pretends to be at work, so that the others wait for it as long as they can.
            message = partial(site.announced, self.name, update, True)
            self.world.send(self.name, site.name, message)

    def greeted(self, by: PeerName) -> None:
        answered = self.world.participant(by).answered
        if self.habit != "silent":
            self.world.send(self.name, by, partial(answered, self.name, None, True))

    def answered(self, by: PeerName, update: Update | None, at_work: bool) -> None:
        self.announced(by, update, at_work)

    def announced(self, by: PeerName, update: Update | None, at_work: bool) -> None:
        if update is not None:
            self._highest = max(self._highest, update.round)

    def serve(self, update: Update) -> Event:
        draw = self.world.random.random()
        if draw < 0.2:
            return FetchFailed(update, Reason.CHECKSUM, retriable=False)
        return FetchFailed(update, Reason.TIMEOUT, True) if draw < 0.4 else Fetched(update)
