"""An honest site: a disk that usually survives, and a process that may not.

What the driver is in the product: it carries out the barrier's commands, tells it what came of
them, and lets nobody hear what is not durable.  It can be killed before and after every
persistence point.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from lightyear_node.barrier import (
    Accuse,
    Alarm,
    Announce,
    Answered,
    Barrier,
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
    Reformed,
    Reported,
    Seal,
    Sealed,
    Terms,
    Tick,
    Train,
    Trained,
)
from lightyear_node.records import Digest, Generation, PeerName, Reason, Round, Update, Verdict
from tests.sim.disk import Disk
from tests.sim.ear import Ear
from tests.sim.world import Happening, Message, World


class Crash(Exception):
    """A site is killed in the middle of what it is doing."""


@dataclass(frozen=True)
class Fate:
    """Something that happens to a site from outside, for the story."""

    words: str


class Site:
    def __init__(self, name: PeerName, world: World) -> None:
        self.name = name
        self.world = world
        self.referee = world.referee
        self.others = [peer for peer in world.names if peer != name]
        members = frozenset(self.others) - {world.conditions.latecomer}
        self.terms = replace(world.conditions.terms, peers=members)
        self.barrier: Barrier | None = None
        self.disk = world.new_disk()
        self.durable = Memory(Generation(0), Round(0), recovering=True)
        """What a restart would find."""
        self.paused = False
        self.longest_wait_s = 0.0
        self._backup: Disk | None = None
        self._life = 0
        self._buried = False
        self._missed: list[Happening] = []
        self._sealed_at: float | None = None
        self._training_since: float | None = None
        self._ear = Ear(name, world)
        self._seen: tuple[Update, ...] = ()

    # Life and death.

    def boot(self) -> None:
        if self.barrier is not None or self._buried:
            return
        self.world.note(self.name, Fate("starts"))
        memory = self.disk.read() or Memory(Generation(0), Round(0), recovering=True)
        self._ear = Ear(self.name, self.world)
        self.barrier = Barrier(self.name, self.terms, memory)
        self.referee.boots(self.name, self.barrier, self.terms)
        self._schedule(self.world.conditions.tick_s, self._tick)
        self._or_die(partial(self._start, memory))

    def _start(self, memory: Memory) -> None:
        assert self.barrier is not None
        self._persist("P0", "start", memory)
        self._carry_out(self.barrier.start(self.world.now, self.world.wall_s()))

    def kill(self) -> None:
        """Nothing remains but the disk."""
        self.barrier = None
        self.paused = False
        self._sealed_at = self._training_since = None
        self._missed.clear()
        self._life += 1

    def crash(self) -> None:
        if self.barrier is None:
            return
        world = self.world
        self.kill()
        world.counts["crashes"] += 1
        world.note(self.name, Fate("is killed"))
        if world.chance(world.conditions.lost_disk):
            self.lose_disk()
        elif world.chance(world.conditions.rolled_back):
            self.restore()
        world.after(world.between(world.conditions.restart_s), self.boot)

    def lose_disk(self) -> None:
        """The keys stay."""
        assert self.barrier is None
        self.disk = self.world.new_disk()
        self.referee.forgets(self.name)
        self.world.counts["lost disks"] += 1
        self.world.note(self.name, Fate("loses its disk"))

    def back_up(self) -> None:
        self._backup = self.disk.copied()
        self.referee.backs_up(self.name)

    def restore(self) -> None:
        assert self.barrier is None
        if self._backup is None:
            return
        self.disk = self._backup.copied()
        self.referee.restores(self.name)
        self.world.counts["disks rolled back"] += 1
        self.world.note(self.name, Fate("is given back an older copy of its disk"))

    def start_recovered(self) -> None:
        """The operator restarts it, and says that its disk is from a backup."""
        self.kill()
        memory = self.disk.read()
        if memory is not None:
            self.disk.write("recovered", replace(memory, recovering=True))
            self.referee.doubts(self.name)
        self.world.note(self.name, Fate("is said to have an older disk"))
        self.boot()

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

    def reform(self, terms: Terms) -> None:
        """Another peers.yaml; a site that is down reads it when it starts."""
        self.terms = terms
        self.tell(Reformed(terms))

    def greeted(self, message: Message) -> None:
        if message.by in self.terms.peers:
            self._when_awake(lambda: self._meet(message))

    def answered(self, message: Message) -> None:
        if message.by in self.terms.peers:
            self.tell(Answered(message.by, self._ear.own(message.yours)))
            self._when_awake(lambda: self._hear(message))

    def announced(self, message: Message) -> None:
        if message.by in self.terms.peers:
            self._when_awake(lambda: self._hear(message))
            if not self.world.chance(self.world.conditions.unanswered):
                self._when_awake(lambda: self._reply(message.by))

    def replied(self, message: Message) -> None:
        if message.by in self.terms.peers:
            self._when_awake(lambda: self._hear(message))

    def serve(self, update: Update) -> Event:
        if self.barrier is None or self.paused or update not in self.disk.served:
            return FetchFailed(update, Reason.UNREACHABLE, retriable=True)
        return Fetched(update)

    def _meet(self, message: Message) -> None:
        self.tell(Heard(message.by))
        yours = self._ear.own(message.yours)
        if yours is not None:
            self.tell(Reported(message.by, (yours,)))
        if self.barrier is not None:
            answered = self.world.participants[message.by].answered
            answer = self._say(yours=self._ear.newest_of(message.by, self.durable))
            self.world.send(self.name, message.by, partial(answered, answer))

    def _reply(self, to: PeerName) -> None:
        replied = self.world.participants[to].replied
        self.world.send(self.name, to, partial(replied, self._say()))

    def _hear(self, message: Message) -> None:
        for event in self._ear.understand(message):
            self.tell(event)

    def _when_awake(self, happening: Happening) -> None:
        """Dead sites miss what happens; stopped ones get to it when they wake up."""
        if self.paused:
            self._missed.append(self._in_this_life(happening))
        elif self.barrier is not None:
            happening()

    def _tell(self, event: Event) -> None:
        if self.barrier is None:
            return
        if self.world.chance(self.world.conditions.crash_any_time):
            self.crash()
            return
        self.world.note(self.name, event)
        self.referee.tells(self.name, event)
        if isinstance(event, Sealed):
            self._sealed_at = self.world.now
        handle = self.barrier.handle
        self._or_die(lambda: self._carry_out(handle(event, self.world.now)))

    def _or_die(self, act: Happening) -> None:
        try:
            act()
        except Crash:
            self.crash()
        if self.barrier is not None:
            self.referee.steps(self.name)

    def _in_this_life(self, happening: Happening) -> Happening:
        life = self._life
        return lambda: happening() if self._life == life else None

    def _schedule(self, delay_s: float, happening: Happening) -> None:
        self.world.after(delay_s, self._in_this_life(happening))

    def _tick(self) -> None:
        self._schedule(self.world.conditions.tick_s, self._tick)
        if not self.paused:
            self.tell(Tick())

    # What a site says.

    def _say(self, yours: Update | None = None) -> Message:
        """Only what a restart would still know."""
        assert self.barrier is not None
        since = self._training_since
        message = Message(
            self.name,
            self.durable.announced,
            self.barrier.phase,
            int(self.world.now - since) if since is not None else 0,
            self.vouched(),
            tuple(self.disk.evidence[peer] for peer in self.durable.quarantined),
            yours,
        )
        self.referee.says(self.name, message.update, message.seen)
        return message

    def vouched(self) -> tuple[Update, ...]:
        return self._seen

    def _announce(self) -> None:
        message = self._say()
        for name in self.others:
            if name in self.terms.peers:
                announced = self.world.participants[name].announced
                self.world.send(self.name, name, partial(announced, message))

    def _greet(self) -> None:
        for name in self.others:
            if name in self.terms.peers:
                greeted = self.world.participants[name].greeted
                greeting = self._say(yours=self._ear.newest_of(name, self.durable))
                self.world.send(self.name, name, partial(greeted, greeting))

    # What a site does.

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            self.world.note(self.name, command)
            self._do(command)

    def _do(self, command: Command) -> None:
        world = self.world
        match command:
            case Greet():
                self._greet()
            case Train():
                self._training_since = world.now
                seconds = world.conditions.train_s * world.conditions.slowness.get(self.name, 1.0)
                digest = Digest(f"{self.name}/{world.random.getrandbits(64):016x}")
                self._later(seconds * world.between((0.8, 1.2)), Trained(digest))
            case Seal(update, memory):
                self._training_since = None
                self._persist("P1", "seal", memory, partial(self._sign, update))
                self._later(0.01, Sealed(update))
            case Announce():
                self._announce()
            case Fetch(update):
                self._schedule(world.between(world.conditions.fetch_s), lambda: self._fetch(update))
            case Judge():
                self.referee.closes(self.name, command)
                if self._sealed_at is not None:
                    self.longest_wait_s = max(self.longest_wait_s, world.now - self._sealed_at)
                verdicts = tuple(self._verdict(update) for update in command.updates)
                self._later(world.between((0.1, 2.0)), Judged(command.round, verdicts))
            case Decide(decision, memory):
                decided = partial(self.referee.decides, self.name, decision)
                self._persist("P2", "decision", memory, decided)
            case Merge(decision):
                self.referee.merges(self.name, decision)
                model = Digest(f"merge of {len(decision.accepted)}")
                self._later(world.between((0.1, 1.0)), Merged(decision.round, model))
            case Commit(round, _, memory):
                committed = partial(self.referee.commits, self.name, round)
                self._persist("P3", "commit", memory, committed)
            case Accuse(first, second, memory):
                accused = partial(self._keep_evidence, first, second)
                self._persist("P4", "evidence", memory, accused)
            case Note(kind, about, memory):
                point = "P5" if kind == "witness" else kind
                noted = partial(self.referee.notes, self.name, kind, about)
                self._persist(point, kind, memory, noted)
            case Alarm(kind):
                world.counts[f"alarms: {kind}"] += 1
            case Finish():
                world.counts["finishes"] += 1

    def _later(self, delay_s: float, event: Event) -> None:
        self._schedule(delay_s, lambda: self.tell(event))

    def _persist(
        self, point: str, kind: str, memory: Memory, durable: Happening | None = None
    ) -> None:
        self._may_crash(f"before {point}")
        self.durable = self.disk.write(kind, memory)
        self._seen = tuple(flat(self.durable.vouched.values()))
        self.world.counts["records"] += 1
        self.referee.persists(self.name, self.durable)
        if durable is not None:
            durable()
        self._may_crash(f"after {point}")

    def _may_crash(self, where: str) -> None:
        directed = self.world.crash_at == (self.name, where)
        if directed:
            self.world.crash_at = None
        if directed or self.world.chance(self.world.conditions.crash_at_point):
            self.world.counts[f"crashes {where}"] += 1
            raise Crash

    def _sign(self, update: Update) -> None:
        self.world.signed.add(update)
        self.referee.signs(self.name, update)

    def _keep_evidence(self, first: Update, second: Update) -> None:
        self.disk.evidence[first.peer] = (first, second)
        self.referee.accuses(self.name, first, second)

    def _fetch(self, update: Update) -> None:
        known = self.disk.fetched.get(update.peer) == update
        event = Fetched(update) if known else self.world.fetch(self.name, update)
        if isinstance(event, Fetched):
            self.disk.fetched[update.peer] = update
        self.tell(event)

    def _verdict(self, update: Update) -> Verdict:
        if self.world.chance(self.world.conditions.rejected):
            return Verdict(update.peer, False, Reason.AGREEMENT_BELOW_TAU, score=0.1)
        return Verdict(update.peer, True, Reason.OK, score=0.9, weight=1.0)


def flat(tables: Iterable[tuple[Update, ...]]) -> Iterable[Update]:
    for table in tables:
        yield from table
