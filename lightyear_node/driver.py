"""The driver: here all worlds meet, and nothing is decided.

Feeds the barrier with what happens and carries out, in order, what it answers.  One loop takes one
event at a time, so that no two decisions race; long work (training, judging, fetching) runs beside
it and comes back as an event.

Journal, then act: a command that changes what must survive a crash is on the disk before the next
one is looked at, and so before any peer can see its effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from lightyear_node.archive import Archive
from lightyear_node.barrier import (
    LEFT_OUT,
    Accuse,
    Alarm,
    Announce,
    Barrier,
    Command,
    Commit,
    Decide,
    Event,
    Fetch,
    Finish,
    Greet,
    Judge,
    Memory,
    Merge,
    Note,
    Phase,
    Seal,
    Sealed,
    Tick,
    Train,
)
from lightyear_node.conversation import Conversation, Saying
from lightyear_node.diary import Diary
from lightyear_node.errands import Errands
from lightyear_node.errors import PeerError
from lightyear_node.ledger import Ledger, Work
from lightyear_node.links import Links, Spawn
from lightyear_node.observe.observer import Observer
from lightyear_node.observe.peers import REMOVED
from lightyear_node.records import Digest, Manifest, PeerName, Reason, Update
from lightyear_node.reporting import Reporting
from lightyear_node.settings import Settings
from lightyear_node.shelf import Shelf
from lightyear_node.space import Space
from lightyear_node.transport.client import PeerClient
from lightyear_node.transport.limits import EVIDENCE_MAX
from lightyear_node.transport.outbox import Offer

TICK_S = 0.2
EVENTS_MAX = 4096
"""Events waiting for the loop; peers' announcements are rate-limited, so it never fills."""


class Inbox:
    """What has happened and was not yet looked at."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue(EVENTS_MAX)

    def put(self, event: Event) -> None:
        """One of our own: there is always room for these."""
        self._events.put_nowait(event)

    def hear(self, event: Event) -> None:
        """One that comes of a peer's words, if there is room: they are said again."""
        if self._events.qsize() < EVENTS_MAX // 2:
            self._events.put_nowait(event)

    async def next(self) -> Event:
        event: Event = Tick()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                event = await self._events.get()
        return event


@dataclass
class Driver:
    """Brings all parts of a node together, round after round."""

    settings: Settings
    barrier: Barrier
    ledger: Ledger
    archive: Archive
    diary: Diary
    shelf: Shelf
    space: Space
    conversation: Conversation
    links: Links
    errands: Errands
    observer: Observer
    reporting: Reporting
    inbox: Inbox
    spawn: Spawn
    stop: Callable[[], None]
    progress: Callable[[], int]
    """How far the worker is: another number whenever it has done something."""
    exit_when_done: bool

    def __post_init__(self) -> None:
        self._in_touch: set[PeerName] = set()
        self._settled: Saying | None = None
        self._beat_at = 0.0
        self._stop_after_round = False

    async def turn(self) -> None:
        """Until it is cancelled."""
        await self._carry_out_all(
            self.barrier.start(time.monotonic(), int(time.time())), self.saying()
        )
        while True:
            event = await self.inbox.next()
            now = time.monotonic()
            self.reporting.turned()
            self.links.report_strangers()
            before = self.saying()
            await self._carry_out_all(self.barrier.handle(event, now), before)
            self.observer.at(self.barrier.round, self.barrier.phase, self.barrier.waiting_for(now))
            if self.exit_when_done and self._everybody_is_done():
                self.stop()

    def finish(self, after_round: bool) -> None:
        """An operator wants this node to end: now, or with the round that is under way."""
        self._stop_after_round = after_round
        if not after_round:
            self.stop()

    def _everybody_is_done(self) -> bool:
        return self.barrier.phase is Phase.FINISHED and all(
            view.state in ("unreachable", REMOVED) or view.phase == Phase.FINISHED
            for view in self.observer.peers.values()
        )

    # Carrying out.

    async def _carry_out_all(self, commands: list[Command], before: Saying) -> None:
        """On a full disk, wait until each is done before the next one is looked at.

        Nothing is awaited otherwise.  Meanwhile peers hear what we said `before`.
        """
        self._settled = before
        for command in commands:
            step = partial(self._carry_out, command)
            await self.space.record(step, meanwhile=self._go_on_talking)
        self._settled = None

    def _carry_out(self, command: Command) -> None:
        match command:
            case Greet() | Announce():
                self._contact_everybody()
            case Train(round):
                self.spawn(self.errands.train(round))
            case Seal(update, memory):
                work = self.errands.work
                assert work is not None
                signed = self.settings.home.identity.sign_manifest(self._manifest(update, work))
                self.ledger.seal(update, memory, work, signed)
                self.inbox.put(Sealed(update))
            case Fetch(update):
                self.spawn(self.errands.fetch(update))
            case Judge():
                self.spawn(self.errands.judge(command))
            case Decide(decision, memory):
                self.ledger.decide(decision, memory, self.errands.rule_state)
                self.observer.decided(decision.round, decision.why, decision.verdicts)
            case Merge(decision):
                self.spawn(self.errands.merge(decision))
            case Commit(round, model, memory):
                brought = self.errands
                self.ledger.commit(round, model, memory, brought.metrics, brought.harm)
                verdicts = self.ledger.rounds()[-1]["verdicts"]
                self.observer.committed(round, model, brought.metrics, brought.harm, verdicts)
                self.shelf.tidy(self.barrier.kept(), self.settings.home.others)
                if self._stop_after_round:
                    self.stop()
            case Note(kind, about, memory):
                self._forget_old_journals(memory)
                self.ledger.note(kind, about, memory)
                self.observer.noted(kind, about, memory.paused, memory.quarantined)
            case Accuse(first, second, memory):
                proof = self.archive.proof(first, second)
                assert proof is not None, "what was told to the barrier is in the archive"
                self.ledger.accuse(proof, memory)
                self.observer.quarantined(first.peer, first.round)
            case Alarm(kind, text, peers):
                if kind == LEFT_OUT:
                    self.observer.left_out(text, peers)
                else:
                    self.observer.degraded(text)
            case Finish():
                self.observer.finished(self.settings.terms.rounds, self.ledger.model)
            case _:
                assert_never(command)

    def _manifest(self, update: Update, work: Work) -> Manifest:
        facts = self.settings.facts
        return Manifest(
            federation=facts.federation,
            update=update,
            lamport=self.conversation.stamp(),
            schema=facts.schema,
            raw_bytes=work.raw_bytes,
            samples=work.samples,
            base=self.shelf.base(),
            dtype=facts.dtype,
        )

    def _forget_old_journals(self, memory: Memory) -> None:
        """A peer that had to begin without its memory has another journal than we know."""
        before = self.ledger.memory.generations
        for peer, (generation, _) in memory.generations.items():
            if peer in before and generation > before[peer][0]:
                self.diary.forget(peer)

    # Talking.

    def _go_on_talking(self) -> None:
        """The loop stands still, but we are alive."""
        self.reporting.turned()
        if time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + self.settings.terms.heartbeat_s
            self._contact_everybody()

    def _contact_everybody(self) -> None:
        """One conversation per peer at a time: a slow peer misses heartbeats, nobody else does."""
        for peer, client in self.links.clients.items():
            if peer not in self._in_touch:
                self._in_touch.add(peer)
                self.spawn(self._contact(peer, client))

    async def _contact(self, peer: PeerName, client: PeerClient) -> None:
        try:
            await self.conversation.contact(peer, client)
        finally:
            self._in_touch.discard(peer)

    # What others ask us.

    def saying(self) -> Saying:
        """Only what is durable, of all that must be: the ledger knows it, not the barrier."""
        if self._settled is not None:
            return self._settled
        ledger = self.ledger
        manifest = ledger.manifest
        current = manifest is not None and manifest.manifest.update == ledger.memory.announced
        return Saying(
            self.barrier.round,
            self.barrier.phase,
            manifest if current else None,
            progress=self.progress(),
            vouched=tuple(
                update
                for peer, known in ledger.memory.vouched.items()
                if peer in self.settings.terms.peers  # of others, nobody would believe it
                for update in known
            ),
            evidence=tuple(ledger.evidence[:EVIDENCE_MAX]),
            head=self.diary.head(),
        )

    async def offer(self, peer: PeerName, digest: Digest) -> Offer | None:
        memory = self.ledger.memory
        if peer in memory.blocked:
            raise PeerError(peer, Reason.BLOCKED, "an operator here has blocked you")
        if peer in memory.quarantined:
            raise PeerError(peer, Reason.QUARANTINED, "you have signed two updates of one round")
        return await self.shelf.offer(digest)
