"""What this machine's people and their tools can ask the node: HTTP and the admin socket.

HTTP is there from the first moment, so that a node that takes long to build its model, or waits
for room on its disk, says so; operators' commands are taken once there are rounds to command.
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

from lightyear_node.barrier import Barrier
from lightyear_node.disclosure import event_told, peer_told, round_in_short, round_told, status_told
from lightyear_node.history import Entry
from lightyear_node.home import Home, State
from lightyear_node.ledger import Ledger
from lightyear_node.observe.access import Keys
from lightyear_node.observe.admin import AdminServer
from lightyear_node.observe.api import Source, api_route
from lightyear_node.observe.http import HttpServer, Route, health_route, metrics_route
from lightyear_node.observe.log import Recent
from lightyear_node.observe.observer import Observer
from lightyear_node.observe.static import page_route
from lightyear_node.observe.supervisor import Supervisor
from lightyear_node.operator_commands import Operator
from lightyear_node.space import Space
from lightyear_node.worker.handle import Worker

LOOP_SILENCE_MAX_S = 10.0
"""A loop that has not turned for so long is not alive."""
LOOP_ANSWER_S = 2.0
BEAT_S = 1.0

T = TypeVar("T")


def http_keys(home: Home) -> Keys:
    """What lets other machines in, if anything does."""
    tls, token = home.site.http.tls, home.site.http.token_file
    return Keys(
        certificate=home.directory / tls.certificate if tls else None,
        key=home.directory / tls.key if tls else None,
        token=home.directory / token if token else None,
    )


class Reporting:
    def __init__(
        self, home: Home, state: State, observer: Observer, worker: Worker, space: Space
    ) -> None:
        self.home = home
        self._state = state
        self._observer = observer
        self._worker = worker
        self._space = space
        self._turned_at = time.monotonic()
        self._rounds: tuple[Ledger, Barrier] | None = None
        self._admin: AdminServer | None = None
        self._recent = Recent()
        self._supervisor = Supervisor(os.environ)

    def turned(self) -> None:
        """The node's loop has come round again."""
        self._turned_at = time.monotonic()
        self._supervisor.alive(self._observer.waiting)

    @contextlib.asynccontextmanager
    async def over_http(self) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self._observer.log.addHandler(self._recent)
        server = self._server()
        beating = self._loop.create_task(self._beat_until_begun())
        if server is not None:
            log, about = self._observer.log, {"event": "listening"}
            log.info("metrics on %s/metrics", server.address, extra=about)
            if server.warning is not None:
                log.warning("%s", server.warning, extra=about)
        try:
            yield
        finally:
            self._supervisor.stopping()
            beating.cancel()
            if server is not None:
                server.close()
            self._observer.log.removeHandler(self._recent)

    def _server(self) -> HttpServer | None:
        listen = self.home.site.http.listen
        denied = partial(self._observer.denied, None, "http_token")
        return HttpServer(listen, self._routes(), http_keys(self.home), denied) if listen else None

    async def _beat_until_begun(self) -> None:
        """Before there are rounds, a loop that is free at all is alive."""
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

    def _source(self) -> Source:
        journal = self._state.journal.path
        return Source(
            status=lambda: status_told(self._from_loop(self.status)),
            sites=lambda: [{"name": self.home.us, "api": "api/v1"}],
            rounds=self.rounds,
            in_short=round_in_short,
            round=lambda number: round_told(journal, number),
            peer=lambda number, peer: peer_told(journal, number, peer),
            events=lambda: [event_told(line) for line in self._recent.lines()],
            run=uuid.uuid4().hex,
        )

    def _from_loop(self, look: Callable[[], T]) -> T:
        """What only the loop's own thread may look at; raises TimeoutError if it is stuck."""
        found: Future[T] = Future()

        def answer() -> None:
            try:
                found.set_result(look())
            except Exception as problem:
                found.set_exception(problem)

        self._loop.call_soon_threadsafe(answer)
        return found.result(LOOP_ANSWER_S)

    # Operators.

    async def answer_operators(self, ledger: Ledger, barrier: Barrier, operator: Operator) -> None:
        """There are rounds from now on."""
        self._rounds = (ledger, barrier)
        self._admin = AdminServer(
            self._state.directory,
            {
                "status": lambda _: self.status(),
                "rounds": lambda _: self.rounds(),
                "health": lambda _: self.not_ready(),
                **operator.routes(),
            },
        )
        await self._admin.start()
        self._supervisor.ready()

    async def stop_answering(self) -> None:
        if self._admin is not None:
            await self._admin.stop()

    # What is told.

    def status(self) -> dict[str, Any]:
        home, agreement = self.home, self.home.agreement
        plain = {
            "name": home.us,
            "federation": agreement.federation,
            "rounds": agreement.rounds,
            "threshold": self._observer.threshold,
            "worker_pid": self._worker.pid,
            "certificate_expires": home.identity.certificate.expires.isoformat(),
            "disk": {"free": self._space.free(), "problem": self._space.problem},
            "problems": self.not_ready(),
            **self._observer.status(),
        }
        if self._rounds is not None:
            ledger, barrier = self._rounds
            plain["generation"] = barrier.generation
            plain["paused"] = barrier.paused
            plain["blocked"] = sorted(ledger.memory.blocked)
            plain["quarantined"] = sorted(ledger.memory.quarantined)
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
        if self.home.identity.certificate.expires <= datetime.now(UTC):
            problems.append("our certificate has ended")
        if self._space.problem is not None:
            problems.append(self._space.problem)
        return problems
