"""One site's daemon, from start to stop.

Makes the parts, connects them, opens them in order and closes them again.  What they do together,
round after round, is the driver's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

from lightyear_node import __version__
from lightyear_node.archive import Archive
from lightyear_node.audit.checkup import problem_with
from lightyear_node.barrier import Barrier, Phase
from lightyear_node.conversation import Conversation, Facts
from lightyear_node.diary import Diary
from lightyear_node.driver import Driver, Inbox
from lightyear_node.errands import Errands
from lightyear_node.home import Home, State
from lightyear_node.learner import Learner, OpenedModel
from lightyear_node.ledger import Ledger
from lightyear_node.links import Links
from lightyear_node.observe.metrics import Metrics
from lightyear_node.observe.observer import Observer
from lightyear_node.observe.peers import PeerView
from lightyear_node.operator_commands import Operator
from lightyear_node.records import Digest, SignedHead
from lightyear_node.reload import Watch
from lightyear_node.reporting import Reporting
from lightyear_node.settings import Settings
from lightyear_node.shelf import Shelf, drop_leftovers
from lightyear_node.space import Needs, Space
from lightyear_node.tracking import Tracking
from lightyear_node.tracking.starting import started
from lightyear_node.transport.codec import Grid
from lightyear_node.witnesses import Witnesses
from lightyear_node.worker.handle import Worker


class _Stopped(Exception):
    """Raised inside the task group to end everything it owns."""


class Node:
    def __init__(
        self,
        home: Home,
        log: logging.Logger,
        load: Callable[[], Home],
        *,
        exit_when_done: bool = False,
        recovered: bool = False,
    ) -> None:
        self._home = home  # as it was at the start; `settings` has the one in force
        self._recovered = recovered
        self._exit_when_done = exit_when_done
        self._terms = home.terms()
        self._state = State(home.directory / home.site.state_dir)
        self._inbox = Inbox()
        self._stop = asyncio.Event()
        self._progress = 0
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
                await self._space.record(lambda: self._begin(model))
                await self._check_files()
                async with self._listening():
                    self._space.release = self._make_room
                    self._spawn(self._space.watch())
                    self._spawn(self._check_journal())
                    self._spawn(self._settings.follow(self._watch))
                    await self._driver.turn()
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
        """Everything that needs to know the model; the first durable record is among it."""
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
            sign=self._sign_head,
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
            say=lambda: self._driver.saying(),
            tell=self._inbox.hear,
            offer=lambda peer, digest: self._driver.offer(peer, digest),
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
        self._record_start(model, facts)
        self._connect(facts)

    def _record_start(self, model: OpenedModel, facts: Facts) -> None:
        home, initial = self._home, model.initial
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

    def _connect(self, facts: Facts) -> None:
        """Everything that needs a ledger which has begun."""
        home, observer = self._home, self._observer
        self._tracking = started(home, self._state.directory, self._ledger, observer.log)
        self._shelf = Shelf(
            self._state, self._ledger, facts.grid, delta=home.agreement.exchange.delta
        )
        observer.remember(self._ledger.rounds())
        observer.stands(self._ledger.memory.paused, self._ledger.memory.quarantined)
        self._barrier = Barrier(home.us, self._terms, self._ledger.memory)
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
            done=self._inbox.put,
            heard=self._inbox.hear,
        )
        self._settings = Settings(
            home,
            self._terms,
            facts,
            self._ledger,
            self._archive,
            self._diary,
            self._space,
            self._conversation,
            self._links,
            observer,
            self._reporting,
            tell=self._inbox.put,
            spawn=self._spawn,
        )
        self._driver = Driver(
            self._settings,
            self._barrier,
            self._ledger,
            self._archive,
            self._diary,
            self._shelf,
            self._space,
            self._conversation,
            self._links,
            self._errands,
            observer,
            self._reporting,
            self._inbox,
            self._spawn,
            stop=self.request_stop,
            progress=lambda: self._progress,
            exit_when_done=self._exit_when_done,
        )
        self._operator = Operator(self._barrier, self._ledger, self._inbox.put, self._driver.finish)

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

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        self._group.create_task(work)

    # The disk.

    async def _check_files(self) -> None:
        damaged = await asyncio.to_thread(self._shelf.check)
        if damaged:
            sound = self._ledger.models[len(damaged)]
            text = "our model %s is damaged: training goes on from that of an earlier round, %s"
            about = {"event": "damaged"}
            self._observer.log.warning(text, ", ".join(damaged), sound, extra=about)
            await self._space.record(partial(self._ledger.fall_back, sound, damaged))

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

    def _sign_head(self, seq: int, hash: Digest) -> SignedHead:
        home = self._settings.home
        return home.identity.sign_head(home.agreement.federation, seq, hash)

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
