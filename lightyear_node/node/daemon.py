"""One site's daemon: starts the parts in order, runs the rounds, and closes everything again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

from lightyear_node.audit.self_check import check_journal
from lightyear_node.node.config_reload import ConfigWatcher
from lightyear_node.node.construction import Prepared, Rounds, open_rounds, own_signing_keys
from lightyear_node.node.home import Home
from lightyear_node.node.stop_request import Stopped
from lightyear_node.node.worker_jobs import OpenedModel

JOURNAL_CHECK_S = 6 * 3600.0
"""Interval between checks of the whole journal in a running node."""


class Node:
    """`load` reads the home again when an operator changes its files."""

    def __init__(self, parts: Prepared, load: Callable[[], Home]) -> None:
        self.parts = parts
        self.rounds: Rounds | None = None
        """None until the model is built and the start is recorded."""
        watched, observer = parts.active.home.watched, parts.observer
        self._watcher = ConfigWatcher(load, watched, observer.log, observer.settings_read)

    def request_stop(self) -> None:
        self.parts.stop.now()

    def request_reload(self) -> None:
        self._watcher.ask()

    async def run(self) -> None:
        """Run until stopped.  Crash-only: a stop leaves behind what a crash would."""
        parts = self.parts
        log = parts.observer.log
        try:
            async with parts.local_api.answering(), asyncio.TaskGroup() as tasks:
                tasks.create_task(parts.stop.wait())

                def spawn(work: Coroutine[Any, Any, Any]) -> None:
                    tasks.create_task(work)

                model = await self._build_model()
                begin = partial(open_rounds, parts, model, spawn)
                rounds = self.rounds = await parts.disk_space.record(begin)
                await _check_files(parts, rounds)
                async with self._listening(rounds):
                    parts.disk_space.release = rounds.make_room
                    spawn(parts.disk_space.watch())
                    spawn(_check_journal(parts))
                    spawn(rounds.config_reload.follow(self._watcher))
                    await rounds.event_loop.run(parts.stop)
        except BaseExceptionGroup as problems:
            _, others = problems.split(Stopped)
            if others is not None:
                raise _first(others) from None
            log.info("stopped", extra={"event": "stopped"})
        finally:
            await self._close()

    async def _close(self) -> None:
        self._watcher.close()
        await self.parts.worker.stop()
        if self.rounds is not None:
            await asyncio.to_thread(self.rounds.tracking.close)
        self.parts.state.close()

    async def _build_model(self) -> OpenedModel:
        parts, observer = self.parts, self.parts.observer
        entry = parts.active.home.config.task.name
        observer.log.info("building the task %s", entry, extra={"event": "start"})
        observer.waiting = f"building the task {entry}"
        model = await parts.disk_space.retry("the first model", parts.worker_jobs.open)
        observer.model_built(model.opened)
        return model

    @contextlib.asynccontextmanager
    async def _listening(self, rounds: Rounds) -> AsyncIterator[None]:
        """Accept calls of peers and commands of operators while this context is open."""
        parts, about = self.parts, {"event": "listening"}
        home, log = parts.active.home, parts.observer.log
        try:
            listen = await rounds.connections.open()
            if listen is not None:
                log.info("listening on %s as %s", listen, home.us, extra=about)
            elif home.others:
                log.info("no port: %s calls the others, and is called back", home.us, extra=about)
            await parts.local_api.answer_operators(
                rounds.round_journal, rounds.barrier, rounds.operator
            )
            yield
        finally:
            await parts.local_api.stop_answering()
            await rounds.connections.close()


async def _check_files(parts: Prepared, rounds: Rounds) -> None:
    """Continue from an earlier round's model where the newest is damaged."""
    journal, disk_space = rounds.round_journal, parts.disk_space
    check = partial(asyncio.to_thread, rounds.retention.check)
    damaged = await disk_space.retry("checking our files", check)
    if damaged:
        sound = journal.models[len(damaged)]
        text = "our model %s is damaged: training goes on from that of an earlier round, %s"
        about = {"event": "damaged"}
        parts.observer.log.warning(text, ", ".join(damaged), sound, extra=about)
        await disk_space.record(partial(journal.fall_back, sound, damaged))


async def _check_journal(parts: Prepared) -> None:
    """Verify the journal from time to time; a damaged one is not continued."""
    state, observer = parts.state, parts.observer
    if parts.self_check.doubt is not None:
        observer.journal_broken(parts.self_check.doubt)
    while True:
        keys = own_signing_keys(parts.active.home)
        check = partial(check_journal, state.directory, keys, closed=True)
        look = partial(asyncio.to_thread, check)
        damage = (await parts.disk_space.retry("checking the journal", look)).damage
        if damage is None:
            observer.journal_holds()
        elif state.journal.broken is None:
            state.journal.broken = damage
            observer.journal_broken(damage)
        await asyncio.sleep(JOURNAL_CHECK_S)


def _first(problems: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error of the first failed task, without the groups that asyncio wraps it in."""
    first = problems.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
