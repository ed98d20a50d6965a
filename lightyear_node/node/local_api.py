"""The node's local API: HTTP for monitoring and the page, and the admin socket for operators.

Both answer from the start, so that a node reports that it is building its model or waiting for disk
space.  Operators' commands are accepted once the rounds have begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from lightyear_node.node.active_config import ActiveConfig
from lightyear_node.node.home import Home
from lightyear_node.node.operator_commands import COMMANDS, OperatorCommands
from lightyear_node.node.worker_process import WorkerProcess
from lightyear_node.observe.admin_socket import AdminServer
from lightyear_node.observe.http.api import ApiSource, api_route
from lightyear_node.observe.http.auth import AccessFiles
from lightyear_node.observe.http.server import HttpServer, Route, health_route, metrics_route
from lightyear_node.observe.http.static_files import page_route
from lightyear_node.observe.http.views import (
    event_view,
    peer_view,
    round_summary,
    round_view,
    status_view,
)
from lightyear_node.observe.log import RecentLines
from lightyear_node.observe.observer import Observer
from lightyear_node.observe.systemd import SystemdNotifier
from lightyear_node.protocol.state_machine import Barrier
from lightyear_node.storage.disk_space import DiskSpace
from lightyear_node.storage.file_descriptors import limit
from lightyear_node.storage.history import Entry
from lightyear_node.storage.round_journal import RoundJournal
from lightyear_node.storage.state_directory import StateDirectory

LOOP_SILENCE_MAX_S = 10.0
"""The node is not alive if its event loop has not turned for so long."""
LOOP_ANSWER_S = 2.0
BEAT_S = 1.0
NOT_YET = {
    "refused": "the node is starting",
    "hint": "try again when `lightyear-node health` says ready; Ctrl-C or SIGTERM ends it now",
}

T = TypeVar("T")


def http_keys(home: Home) -> AccessFiles:
    """The files that allow access from other machines: certificate, key, token."""
    tls, token = home.config.http.tls, home.config.http.token_file
    return AccessFiles(
        certificate=home.directory / tls.certificate if tls else None,
        key=home.directory / tls.key if tls else None,
        token=home.directory / token if token else None,
    )


class LocalApi:
    def __init__(
        self,
        active: ActiveConfig,
        state: StateDirectory,
        observer: Observer,
        worker: WorkerProcess,
        space: DiskSpace,
    ) -> None:
        self._active = active
        self._state = state
        self._observer = observer
        self._worker = worker
        self._space = space
        self._turned_at = time.monotonic()
        self._rounds: tuple[RoundJournal, Barrier] | None = None
        self._admin = AdminServer(
            state.directory,
            {
                "status": lambda _: self.status(),
                "rounds": lambda _: self.rounds(),
                "health": lambda _: self.not_ready(),
                **dict.fromkeys(COMMANDS, lambda _: NOT_YET),
            },
        )
        self._recent = RecentLines()
        self._supervisor = SystemdNotifier(os.environ)
        self._loop: asyncio.AbstractEventLoop | None = None

    def turned(self) -> None:
        """The event loop has completed a turn."""
        self._turned_at = time.monotonic()
        self._supervisor.alive(self._observer.waiting)

    @contextlib.asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """Serve HTTP and the admin socket while this context is open."""
        loop = self._loop = asyncio.get_running_loop()
        log = self._observer.log
        log.addHandler(self._recent)
        for handler in log.handlers:
            handler.addFilter(self._observer.log_limits)
        server = self._server()
        beating = loop.create_task(self._beat_while_starting())
        if server is not None:
            about = {"event": "listening"}
            log.info("metrics on %s/metrics", server.address, extra=about)
            if server.warning is not None:
                log.warning("%s", server.warning, extra=about)
        try:
            # A full disk has no space for the socket's name; it is retried when rounds begin.
            with contextlib.suppress(OSError):
                await self._admin.start()
            yield
        finally:
            self._supervisor.stopping()
            beating.cancel()
            await self.stop_answering()
            if server is not None:
                server.close()
            for handler in log.handlers:
                handler.removeFilter(self._observer.log_limits)
            log.removeHandler(self._recent)

    def _server(self) -> HttpServer | None:
        home = self._active.home
        if not home.config.http.listen:
            return None
        denied = partial(self._observer.peers.denied, None, "http_token")
        return HttpServer(home.config.http.listen, self._routes(), http_keys(home), denied)

    async def _beat_while_starting(self) -> None:
        """Before the rounds begin, a loop that runs at all is alive."""
        while self._rounds is None:
            self.turned()
            self._supervisor.starting()
            await asyncio.sleep(BEAT_S)

    def _routes(self) -> list[Route]:
        return [
            metrics_route(self._observer.metrics.registry),
            health_route("/livez", self.not_alive),
            health_route("/readyz", self.not_ready),
            api_route(self._source()),
            page_route(),
        ]

    def _source(self) -> ApiSource:
        journal = self._state.journal.path
        return ApiSource(
            status=lambda: status_view(self._from_loop(self.status)),
            sites=lambda: [{"name": self._active.home.us, "api": "api/v1"}],
            rounds=self.rounds,
            in_short=round_summary,
            round=lambda number: round_view(journal, number),
            peer=lambda number, peer: peer_view(journal, number, peer),
            events=lambda: [event_view(line) for line in self._recent.lines()],
            run=uuid.uuid4().hex,
        )

    def _from_loop(self, look: Callable[[], T]) -> T:
        """Run `look` in the event loop's thread; raises TimeoutError if the loop is stuck."""
        found: Future[T] = Future()

        def answer() -> None:
            try:
                found.set_result(look())
            except Exception as problem:
                found.set_exception(problem)

        assert self._loop is not None  # HTTP answers only while the loop runs
        self._loop.call_soon_threadsafe(answer)
        return found.result(LOOP_ANSWER_S)

    # Operators' commands.

    async def answer_operators(
        self, round_journal: RoundJournal, barrier: Barrier, operator: OperatorCommands
    ) -> None:
        """Accept operators' commands: the rounds have begun."""
        self._rounds = (round_journal, barrier)
        self._admin.routes.update(operator.routes())
        await self._admin.start()
        self._supervisor.ready()

    async def stop_answering(self) -> None:
        await self._admin.stop()

    # The answers.

    def status(self) -> dict[str, Any]:
        home, federation = self._active.home, self._active.home.federation
        plain = {
            "name": home.us,
            "federation": federation.federation,
            "rounds": federation.rounds,
            "starting": self._rounds is None,
            "threshold": self._observer.threshold,
            "worker_pid": self._worker.pid,
            "certificate_expires": home.identity.certificate.expires.isoformat(),
            "disk": {"free": self._space.free(), "problem": self._space.problem},
            "descriptors": {"limit": limit(), "problem": self._space.files.problem},
            "problems": self.not_ready(),
            **self._observer.status(),
        }
        if self._rounds is not None:
            round_journal, barrier = self._rounds
            plain["generation"] = barrier.generation
            plain["paused"] = barrier.paused
            plain["blocked"] = sorted(round_journal.memory.blocked)
            plain["quarantined"] = sorted(round_journal.memory.quarantined)
        return plain

    def rounds(self) -> list[Entry]:
        return self._rounds[0].rounds() if self._rounds is not None else []

    def not_alive(self) -> list[str]:
        silent_s = time.monotonic() - self._turned_at
        return [f"the loop has not turned for {silent_s:.0f} s"] * (silent_s > LOOP_SILENCE_MAX_S)

    def not_ready(self) -> list[str]:
        problems = self.not_alive()
        if self._rounds is None:
            problems.append("the node is starting")
        if self._worker.pid is None:
            problems.append("the worker is not running")
        if self._observer.failure is not None:
            problems.append(self._observer.failure)
        if self._active.home.identity.certificate.expires <= datetime.now(UTC):
            problems.append("our certificate has ended")
        if self._space.problem is not None:
            problems.append(self._space.problem)
        if self._space.files.problem is not None:
            problems.append(self._space.files.problem)
        if self._state.journal.broken is not None:
            problems.append(f"nothing is signed any more: {self._state.journal.broken}")
        return problems
