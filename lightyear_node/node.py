"""The driver: the only file that knows all worlds.

It feeds the barrier with what happens and carries out, in order, what the barrier answers; it
decides nothing about a round.  One loop takes one event at a time, so that no two decisions race;
long work (training, judging, fetching) runs beside it and comes back as an event.

Journal, then act: a command that changes what must survive a crash is on the disk before the next
one is looked at, and so before any peer can see its effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, assert_never

from lightyear_node import __version__
from lightyear_node.archive import Archive
from lightyear_node.audit.checkup import problem_with
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
    Reformed,
    Seal,
    Sealed,
    Tick,
    Train,
)
from lightyear_node.conversation import Conversation, Facts, Saying
from lightyear_node.diary import Diary
from lightyear_node.errands import Errands
from lightyear_node.errors import (
    ConfigError,
    DiskFull,
    PeerError,
)
from lightyear_node.home import Home, State
from lightyear_node.learner import Learner, OpenedModel
from lightyear_node.ledger import Ledger, Work
from lightyear_node.links import Links
from lightyear_node.observe.metrics import Metrics
from lightyear_node.observe.observer import Observer
from lightyear_node.observe.peers import REMOVED, PeerView
from lightyear_node.operator_commands import Operator
from lightyear_node.records import (
    Digest,
    Manifest,
    PeerName,
    Reason,
    Update,
)
from lightyear_node.reload import Watch, adopted, compare
from lightyear_node.reporting import Reporting
from lightyear_node.shelf import Shelf, drop_leftovers
from lightyear_node.space import Needs, Space
from lightyear_node.tracking import Tracking
from lightyear_node.tracking.starting import started
from lightyear_node.transport.client import PeerClient
from lightyear_node.transport.codec import Grid
from lightyear_node.transport.limits import EVIDENCE_MAX
from lightyear_node.transport.outbox import Offer
from lightyear_node.witnesses import Witnesses
from lightyear_node.worker.handle import Worker

TICK_S = 0.2
EVENTS_MAX = 4096
"""Events waiting for the loop; peers' announcements are rate-limited, so it never fills."""


class _Stopped(Exception):
    """Raised inside the task group to end everything it owns."""


class Node:
    """One site's daemon, from start to stop."""

    def __init__(
        self,
        home: Home,
        log: logging.Logger,
        load: Callable[[], Home],
        *,
        exit_when_done: bool = False,
        recovered: bool = False,
    ) -> None:
        self._home = home
        self._recovered = recovered
        self._postponed: tuple[str, ...] = ()
        self._exit_when_done = exit_when_done
        self._terms = home.terms()
        self._state = State(home.directory / home.site.state_dir)
        self._events: asyncio.Queue[Event] = asyncio.Queue(EVENTS_MAX)
        self._stop = asyncio.Event()
        self._in_touch: set[PeerName] = set()
        self._progress = 0
        self._stop_after_round = False
        self._observer = Observer(
            Metrics(
                home.others,
                [*Phase, "starting"],
                __version__,
                home.agreement.rounds,
                quality=home.site.metrics.quality,
            ),
            log,
            {peer: PeerView() for peer in home.others},
            home.rule.threshold,
            self._terms.heartbeat_s,
        )
        self._watch = Watch(load, home.watched, log, self._observer.settings_read)
        expires = home.identity.certificate.expires
        self._observer.metrics.certificate_expiry.set(expires.timestamp())
        self._observer.metrics.worker_up.set_function(lambda: self._worker.pid is not None)
        self._worker = Worker(
            home.opening(),
            silence_s=home.site.worker.silence,
            on_progress=self._progressed,
            on_output=self._task_said,
            full_errors=home.site.log.task_errors == "full",
        )
        self._learner = Learner(
            self._worker,
            self._state,
            self._observer.worker_restarted,
            partial(log.warning, "%s", extra={"event": "clamped"}),
        )
        self._space = Space(self._state.directory, home.site.disk, self._observer)
        self._space.release = lambda enough, for_ourselves: drop_leftovers(self._state)
        self._observer.metrics.disk_free.set_function(self._space.free)
        self._reporting = Reporting(home, self._state, self._observer, self._worker, self._space)
        self._tracking: Tracking | None = None
        self._settled: Saying | None = None
        self._beat_at = 0.0

    def request_stop(self) -> None:
        self._stop.set()

    def request_reload(self) -> None:
        self._watch.ask()

    async def run(self) -> None:
        """Until stopped.  Crash-only: what stopping leaves behind is what a crash would."""
        log = self._observer.log
        try:
            async with self._reporting.over_http(), asyncio.TaskGroup() as self._group:
                self._spawn(self._stop_when_asked())
                entry = self._home.site.task.entry
                log.info("building the task %s", entry, extra={"event": "start"})
                model = await self._space.through("the first model", self._learner.open)
                self._observer.introduce(model.opened)
                await self._write(lambda: self._begin(model))
                await self._check_files()
                async with self._listening():
                    self._space.release = self._make_room
                    self._spawn(self._space.watch())
                    self._spawn(self._check_journal())
                    self._spawn(self._follow_settings())
                    await self._turn()
        except BaseExceptionGroup as problems:
            _, others = problems.split(_Stopped)
            if others is not None:
                raise _first(others) from None
            log.info("stopped", extra={"event": "stopped"})
        finally:
            self._watch.close()
            await self._worker.stop()
            if self._tracking is not None:
                await asyncio.to_thread(self._tracking.close)
            self._state.close()

    async def _stop_when_asked(self) -> None:
        await self._stop.wait()
        raise _Stopped

    def _begin(self, model: OpenedModel) -> None:
        """Everything that needs to know the model, up to the first durable record."""
        home, observer = self._home, self._observer
        initial = model.initial
        facts = Facts(
            us=home.us,
            federation=home.agreement.federation,
            agreement=home.agreement.digest(),
            schema=model.schema,
            initial_model=initial.digest,
            grid=Grid(model.header),
            boot_id=str(uuid.uuid4()),
            dtype=home.agreement.exchange.dtype,
            clauses=home.agreement.clauses(),
        )
        self._facts = facts
        self._archive = Archive(
            home.certificates,
            federation=facts.federation,
            schema=facts.schema,
            raw_bytes=facts.grid.raw_bytes,
            dtype=facts.dtype,
        )
        self._ledger = Ledger(
            self._state.journal,
            wall_ns=time.time_ns,
            stamp=lambda: self._conversation.stamp(),
            find=self._archive.find,
            on_record=observer.metrics.records.inc,
            sign=lambda seq, hash: self._home.identity.sign_head(facts.federation, seq, hash),
            models_kept=home.site.keep.models,
        )
        self._archive.restore(self._ledger.seen)
        witnesses = Witnesses(
            self._ledger,
            us=home.us,
            federation=facts.federation,
            signing_key=home.identity.certificate.signing_key,
        )
        self._diary = Diary(
            self._ledger,
            witnesses,
            self._archive,
            observer,
            share_verdicts=home.site.share_verdicts,
        )
        self._conversation = Conversation(
            facts,
            self._archive,
            observer,
            self._diary,
            say=self._saying,
            tell=self._heard,
            offer=self._offer,
            wall_ns=time.time_ns,
            lamport=self._state.journal.lamport,
        )
        self._space.size_up(
            Needs(
                model=initial.raw_bytes,
                update=model.wire_raw_bytes,
                carry=self._state.carry.largest(),
                peers=len(home.others),
                models_kept=home.site.keep.models,
            )
        )
        self._ledger.start(
            schema=model.home_schema,
            dtype=facts.dtype,
            initial_model=initial.digest,
            rule=home.rule.name,
            about={
                "site": home.us,
                "federation": facts.federation,
                "signing_key": home.identity.certificate.signing_key.hex(),
                "boot_id": facts.boot_id,
                "version": __version__,
                "agreement": facts.agreement,
                "initial_model": initial.digest,
                "task": home.site.task.entry,
                "seed": home.agreement.seed,
                "sites": sorted(home.certificates),
                "rounds": home.agreement.rounds,
                "rule_terms": home.rule.model_dump(),
            },
            recovered=self._recovered,
        )
        self._tracking = started(home, self._state.directory, self._ledger, observer.log)
        self._shelf = Shelf(
            self._state, self._ledger, facts.grid, delta=home.agreement.exchange.delta
        )
        observer.remember(self._ledger.rounds())
        observer.stands(self._ledger.memory.paused, self._ledger.memory.quarantined)
        self._barrier = Barrier(home.us, self._terms, self._ledger.memory)
        self._operator = Operator(
            self._barrier, self._ledger, self._events.put_nowait, self._finish
        )
        self._links = Links(home, self._conversation, self._state.directory, self._terms.faulty_max)
        self._errands = Errands(
            self._learner,
            self._ledger,
            self._state,
            self._space,
            self._shelf,
            self._archive,
            self._links,
            self._barrier,
            observer,
            facts.grid,
            done=self._events.put_nowait,
            heard=self._heard,
        )

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        """Open to peers, operators and monitoring; closed again whatever happens."""
        home, log, about = self._home, self._observer.log, {"event": "listening"}
        try:
            listen = await self._links.open(self._spawn)
            if listen is not None:
                log.info("listening on %s as %s", listen, home.us, extra=about)
            elif home.others:
                log.info("no port: %s calls the others, and is called back", home.us, extra=about)
            await self._reporting.answer_operators(self._ledger, self._barrier, self._operator)
            yield
        finally:
            await self._reporting.stop_answering()
            await self._links.close()

    # The loop.

    async def _turn(self) -> None:
        await self._carry_out_all(
            self._barrier.start(time.monotonic(), int(time.time())), self._saying()
        )
        while True:
            event: Event = Tick()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    event = await self._events.get()
            now = time.monotonic()
            self._reporting.turned()
            self._links.report_strangers()
            before = self._saying()
            await self._carry_out_all(self._barrier.handle(event, now), before)
            self._observer.at(
                self._barrier.round, self._barrier.phase, self._barrier.waiting_for(now)
            )
            if self._exit_when_done and self._everybody_is_done():
                self.request_stop()

    def _heard(self, event: Event) -> None:
        """What peers say is said again at the next heartbeat; our own events must always fit."""
        if self._events.qsize() < EVENTS_MAX // 2:
            self._events.put_nowait(event)

    def _everybody_is_done(self) -> bool:
        return self._barrier.phase is Phase.FINISHED and all(
            view.state in ("unreachable", REMOVED) or view.phase == Phase.FINISHED
            for view in self._observer.peers.values()
        )

    async def _carry_out_all(self, commands: list[Command], before: Saying) -> None:
        """On a full disk, wait until each is done before the next one is looked at.

        Nothing is awaited otherwise.  Meanwhile peers hear what we said `before`.
        """
        self._settled = before
        for command in commands:
            await self._write(partial(self._carry_out, command), meanwhile=self._go_on_talking)
        self._settled = None

    async def _write(
        self, step: Callable[[], None], meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Do what may have to be recorded, as soon as there is room for the record."""

        async def write() -> None:
            step()

        await self._space.through("a record in the journal", write, meanwhile=meanwhile)

    def _go_on_talking(self) -> None:
        """The loop stands still, but we are alive."""
        self._reporting.turned()
        if time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + self._terms.heartbeat_s
            self._contact_everybody()

    def _carry_out(self, command: Command) -> None:
        match command:
            case Greet() | Announce():
                self._contact_everybody()
            case Train(round):
                self._spawn(self._errands.train(round))
            case Seal(update, memory):
                work = self._errands.work
                assert work is not None
                signed = self._home.identity.sign_manifest(self._manifest(update, work))
                self._ledger.seal(update, memory, work, signed)
                self._events.put_nowait(Sealed(update))
            case Fetch(update):
                self._spawn(self._errands.fetch(update))
            case Judge():
                self._spawn(self._errands.judge(command))
            case Decide(decision, memory):
                self._ledger.decide(decision, memory, self._errands.rule_state)
                self._observer.decided(decision.round, decision.why, decision.verdicts)
            case Merge(decision):
                self._spawn(self._errands.merge(decision))
            case Commit(round, model, memory):
                brought = self._errands
                self._ledger.commit(round, model, memory, brought.metrics, brought.harm)
                verdicts = self._ledger.rounds()[-1]["verdicts"]
                self._observer.committed(round, model, brought.metrics, brought.harm, verdicts)
                self._shelf.tidy(self._barrier.kept(), self._home.others)
                if self._stop_after_round:
                    self.request_stop()
            case Note(kind, about, memory):
                self._forget_old_journals(memory)
                self._ledger.note(kind, about, memory)
                self._observer.noted(kind, about, memory.paused, memory.quarantined)
            case Accuse(first, second, memory):
                proof = self._archive.proof(first, second)
                assert proof is not None, "what was told to the barrier is in the archive"
                self._ledger.accuse(proof, memory)
                self._observer.quarantined(first.peer, first.round)
            case Alarm(kind, text, peers):
                if kind == LEFT_OUT:
                    self._observer.left_out(text, peers)
                else:
                    self._observer.degraded(text)
            case Finish():
                self._observer.finished(self._terms.rounds, self._ledger.model)
            case _:
                assert_never(command)

    def _forget_old_journals(self, memory: Memory) -> None:
        """A peer that had to begin without its memory has another journal than we know."""
        before = self._ledger.memory.generations
        for peer, (generation, _) in memory.generations.items():
            if peer in before and generation > before[peer][0]:
                self._diary.forget(peer)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        self._group.create_task(work)

    # Talking.

    def _contact_everybody(self) -> None:
        """One conversation per peer at a time: a slow peer misses heartbeats, nobody else does."""
        for peer, client in self._links.clients.items():
            if peer not in self._in_touch:
                self._in_touch.add(peer)
                self._spawn(self._contact(peer, client))

    async def _contact(self, peer: PeerName, client: PeerClient) -> None:
        try:
            await self._conversation.contact(peer, client)
        finally:
            self._in_touch.discard(peer)

    # What operators change meanwhile.

    async def _follow_settings(self) -> None:
        while True:
            self._adopt(await self._watch.changed())

    def _adopt(self, found: Home) -> None:
        """Act on changed settings as far as a running node can."""
        changes = compare(self._home, found)
        if changes.postponed and changes.postponed != self._postponed:
            text = "takes effect after a restart: %s"
            postponed = ", ".join(changes.postponed)
            self._observer.log.warning(text, postponed, extra={"event": "settings"})
        self._postponed = changes.postponed
        if not changes:
            return
        home = self._home = self._reporting.home = adopted(self._home, found)
        self._facts = replace(
            self._facts, agreement=home.agreement.digest(), clauses=home.agreement.clauses()
        )
        record = partial(
            self._ledger.settings,
            changes.to_plain(),
            certificate=home.identity.fingerprint,
            agreement=self._facts.agreement,
        )
        try:
            record()
        except DiskFull:
            # Whoever is removed is cut off now, and not when there is room to write it down.
            self._spawn(self._write(record))
        self._archive.agree(home.certificates)
        self._conversation.agree(self._facts)
        for peer in changes.removed:
            self._diary.forget(peer)
        self._links.replace(home, changes, self._spawn)
        expires = home.identity.certificate.expires.timestamp()
        rounds = home.agreement.rounds
        self._observer.reconfigured(str(changes), expires, home.others, rounds)
        if changes.removed or changes.joined or changes.terms:
            self._events.put_nowait(self._reformed(home))

    def _reformed(self, home: Home) -> Reformed:
        try:
            self._terms = home.terms()
        except ConfigError as problem:
            # Whoever was removed is gone at once all the same; the rounds wait for better terms.
            text = "with these settings it will not start again: %s"
            self._observer.log.warning(text, problem, extra={"event": "settings"})
            return Reformed(self._terms, self._terms.peers - set(home.others))
        return Reformed(self._terms)

    def _finish(self, after_round: bool) -> None:
        """An operator wants this node to end: now, or with the round that is under way."""
        self._stop_after_round = after_round
        if not after_round:
            self.request_stop()

    # What others ask us.

    def _saying(self) -> Saying:
        """Only what is durable, of all that must be: the ledger knows it, not the barrier."""
        if self._settled is not None:
            return self._settled
        ledger = self._ledger
        manifest = ledger.manifest
        current = manifest is not None and manifest.manifest.update == ledger.memory.announced
        return Saying(
            self._barrier.round,
            self._barrier.phase,
            manifest if current else None,
            progress=self._progress,
            vouched=tuple(
                update
                for peer, known in ledger.memory.vouched.items()
                if peer in self._terms.peers  # of others, nobody would believe it
                for update in known
            ),
            evidence=tuple(ledger.evidence[:EVIDENCE_MAX]),
            head=self._diary.head(),
        )

    async def _offer(self, peer: PeerName, digest: Digest) -> Offer | None:
        memory = self._ledger.memory
        if peer in memory.blocked:
            raise PeerError(peer, Reason.BLOCKED, "an operator here has blocked you")
        if peer in memory.quarantined:
            raise PeerError(peer, Reason.QUARANTINED, "you have signed two updates of one round")
        return await self._shelf.offer(digest)

    # The disk.

    async def _check_files(self) -> None:
        damaged = await asyncio.to_thread(self._shelf.check)
        if damaged:
            sound = self._ledger.models[len(damaged)]
            text = "our model %s is damaged: training goes on from that of an earlier round, %s"
            about = {"event": "damaged"}
            self._observer.log.warning(text, ", ".join(damaged), sound, extra=about)
            await self._write(partial(self._ledger.fall_back, sound, damaged))

    async def _check_journal(self) -> None:
        keys = [one.signing_key for one in self._home.certificates[self._home.us]]
        problem = await asyncio.to_thread(problem_with, self._state.directory, keys)
        if problem is None:
            self._observer.journal_holds()
        else:
            self._observer.journal_broken(problem)

    def _make_room(self, enough: Callable[[], bool], for_ourselves: bool) -> None:
        self._links.shed()
        self._shelf.make_room(self._barrier.kept(), enough, for_ourselves=for_ourselves)

    # The small print.

    def _manifest(self, update: Update, work: Work) -> Manifest:
        return Manifest(
            federation=self._facts.federation,
            update=update,
            lamport=self._conversation.stamp(),
            schema=self._facts.schema,
            raw_bytes=work.raw_bytes,
            samples=work.samples,
            base=self._shelf.base(),
            dtype=self._facts.dtype,
        )

    def _task_said(self, line: str) -> None:
        if self._home.site.log.task_output:
            self._observer.log.info("task: %s", line, extra={"event": "task_output"})

    def _progressed(self, job: str, done: int, total: int) -> None:
        self._observer.progress = (done, total)
        self._observer.under_way.worked(job, done, total)
        self._progress += 1


def _first(problems: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error of a failed task, out of the group that asyncio wraps it in."""
    first = problems.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
