"""Event loop: feeds the protocol and executes its commands.  Contains no policy.

One event is handled at a time, so no two decisions race.  Long jobs run beside the loop and come
back as events.

Journal, then act: a command that changes what must survive a crash is on disk before the next one
is executed, and so before any peer can see its effect.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from lightyear_node.errors import JournalCorrupt
from lightyear_node.node.heartbeat import Heartbeat, OwnState
from lightyear_node.node.inbox import TICK_S, Inbox
from lightyear_node.node.recorder import Recorder
from lightyear_node.node.round_jobs import RoundJobs
from lightyear_node.node.stop_request import StopRequest
from lightyear_node.observe.observer import Observer
from lightyear_node.observe.peer_status import REMOVED
from lightyear_node.protocol.events import (
    Accuse,
    Alarm,
    Announce,
    Command,
    Commit,
    Decide,
    Fetch,
    Finish,
    Greet,
    Judge,
    Merge,
    Note,
    Seal,
    Sealed,
    Train,
)
from lightyear_node.protocol.parameters import Phase
from lightyear_node.protocol.state_machine import LEFT_OUT, Barrier
from lightyear_node.storage.disk_space import DiskSpace


@dataclass(eq=False, repr=False)
class EventLoop:
    _barrier: Barrier
    _inbox: Inbox
    _own_state: OwnState
    _heartbeat: Heartbeat
    _recorder: Recorder
    _round_jobs: RoundJobs
    _disk_space: DiskSpace
    _observer: Observer

    async def run(self, stop: StopRequest) -> None:
        """Run until cancelled."""
        barrier, observer = self._barrier, self._observer
        commands = barrier.start(time.monotonic(), int(time.time()))
        with self._own_state.held():
            await self._execute_all(commands, stop)
        while True:
            event, proofs = await self._inbox.next()
            now = time.monotonic()
            self._heartbeat.loop_turned()
            with self._own_state.held():
                full = self._recorder.keep(proofs)
                commands = barrier.handle(event, now)
                await self._execute_all(commands, stop)
            if full:
                self._recorder.prune()
            observer.set_phase(barrier.round, barrier.phase, barrier.waiting_for(now))
            observer.peers.withheld(barrier.withheld)
            if stop.when_finished and self._all_finished():
                stop.now()

    def _all_finished(self) -> bool:
        return self._barrier.phase is Phase.FINISHED and all(
            view.state in ("unreachable", REMOVED) or view.phase == Phase.FINISHED
            for view in self._observer.peers.values()
        )

    async def _execute_all(self, commands: list[Command], stop: StopRequest) -> None:
        """Execute commands in order; while the disk is full, wait at the first that needs it.

        Meanwhile heartbeats go on, with the state from before the event.
        """
        for command in commands:
            step = partial(self._execute, command, stop)
            try:
                await self._disk_space.record(step, meanwhile=self._heartbeat.keep_alive)
            except JournalCorrupt as problem:
                await self._stand_still(problem)

    async def _stand_still(self, problem: JournalCorrupt) -> None:
        """Never continue a damaged journal: announce what was durable, sign nothing new.

        Ends only with the node.
        """
        self._observer.journal_broken(str(problem))
        while True:
            await asyncio.sleep(TICK_S)
            self._heartbeat.keep_alive()

    def _execute(self, command: Command, stop: StopRequest) -> None:
        match command:
            case Greet() | Announce():
                self._heartbeat.contact_peers()
            case Train() | Fetch() | Judge() | Merge():
                self._round_jobs.start(command)
            case Seal(update):
                self._recorder.seal(command)
                self._inbox.put(Sealed(update))
            case Decide():
                self._recorder.decide(command)
            case Commit():
                self._recorder.commit(command)
                if stop.after_round:
                    stop.now()
            case Note():
                self._recorder.note(command)
            case Accuse():
                self._recorder.accuse(command)
            case Alarm(kind, text, peers):
                if kind == LEFT_OUT:
                    self._observer.left_out(text, peers)
                else:
                    self._observer.degraded(text)
            case Finish():
                self._recorder.finished()
            case _:
                assert_never(command)
