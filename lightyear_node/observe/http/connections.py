"""Accepts HTTP connections, limits their number and duration, and runs each in a thread.

Limits the connections per address and in total.  The number of threads is fixed; a request that
misses its deadline ends because its connection is shut down.  Knows nothing of HTTP itself.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from lightyear_node.errors import ConfigError
from lightyear_node.observe.http.auth import HttpAccess
from lightyear_node.storage.file_descriptors import EXHAUSTED

CONNECTIONS_MAX = 32
PER_ADDRESS_MAX = 16
"""So that one machine cannot lock out others or local health probes."""
HEALTH_RESERVE = 4
"""Further connections, for health probes only, while all others are busy."""
BACKLOG = 64
REQUEST_S = 5.0
"""Time limit from accepting a connection to the end of the request head, TLS included."""
RESPONSE_S = 30.0
"""Time limit from there to the last byte of the response."""
POLL_S = 0.25

_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Connection:
    sock: socket.socket
    host: str
    health_only: bool = False
    """Whether it takes one of the connections reserved for health probes."""
    waiting: bool = True
    """Whether its request is not complete yet."""
    deadline: float = field(default_factory=lambda: time.monotonic() + REQUEST_S)

    def request_complete(self) -> None:
        """Extend the deadline for the response."""
        self.waiting = False
        self.deadline = time.monotonic() + RESPONSE_S

    def shut_down(self) -> None:
        # The TCP connection, not TLS: the TLS object must not be used from another thread.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


Handle = Callable[[Connection], None]
"""Handles one connection, in a thread of the pool."""


class Connections(socketserver.TCPServer):
    allow_reuse_address = True
    request_queue_size = BACKLOG

    def __init__(self, access: HttpAccess, handle: Handle) -> None:
        self._access = access
        self._handle = handle
        self._open: dict[Connection, None] = {}
        """Oldest first."""
        self._spare_fd: int | None = None
        self._reserve_spare_fd()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(
            CONNECTIONS_MAX + HEALTH_RESERVE, thread_name_prefix="http"
        )
        listen = f"{access.host}:{access.port}"
        try:
            [(self.address_family, *_, address), *_] = socket.getaddrinfo(
                access.host, access.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            super().__init__(address, socketserver.BaseRequestHandler)  # type: ignore[arg-type]
        except OSError as problem:
            in_use = problem.errno == errno.EADDRINUSE
            raise ConfigError(
                f"http.listen: cannot listen on {listen}: {problem.strerror}",
                hint="another node may use that port: set another `http.listen` in node.yaml"
                if in_use
                else "set an address of this machine as `http.listen` in node.yaml",
            ) from None
        self.port: int = self.server_address[1]
        self._thread = threading.Thread(target=self.serve_forever, args=(POLL_S,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()
        self._release_spare_fd()
        with self._lock:
            for connection in self._open:
                connection.shut_down()
        # Does not wait: a handler may wait for the event loop, which may be the caller.
        self._threads.shutdown(wait=False, cancel_futures=True)

    def open(self) -> list[Connection]:
        with self._lock:
            return list(self._open)

    # Called by the server, in its own thread.

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as problem:
            if problem.errno in EXHAUSTED and self._spare_fd is not None:
                self._release_spare_fd()
                return super().get_request()
            time.sleep(POLL_S)  # usually no free file descriptors: retrying at once would not help
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        connection = Connection(request, client_address[0])
        with self._lock:
            admitted = self._admit(connection)
            if admitted:
                self._open[connection] = None
        if admitted:
            self._threads.submit(self._serve, connection)
        else:
            self._refuse(request)

    def _admit(self, connection: Connection) -> bool:
        """Whether there is room, if necessary by evicting the oldest incomplete request."""
        general = [one for one in self._open if not one.health_only]
        same_host = [one for one in general if one.host == connection.host]
        if len(general) < CONNECTIONS_MAX and len(same_host) < PER_ADDRESS_MAX:
            return True
        if self._evict(same_host if len(same_host) >= PER_ADDRESS_MAX else general):
            return True
        connection.health_only = True
        health = [one for one in self._open if one.health_only]
        return len(health) < HEALTH_RESERVE or self._evict(health)

    def _evict(self, candidates: list[Connection]) -> bool:
        oldest = next((one for one in candidates if one.waiting), None)
        if oldest is None:
            return False
        oldest.shut_down()
        del self._open[oldest]
        return True

    def _refuse(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if self._access.scheme == "http":
            with contextlib.suppress(OSError):
                connection.send(_BUSY)
        self.shutdown_request(connection)

    def service_actions(self) -> None:
        """Enforce deadlines; called after every connection and several times a second."""
        self._reserve_spare_fd()
        now = time.monotonic()
        with self._lock:
            late = [connection for connection in self._open if now > connection.deadline]
        for connection in late:
            connection.shut_down()

    def _reserve_spare_fd(self) -> None:
        """Keep a file descriptor in reserve, for a health probe when no other is free."""
        if self._spare_fd is None:
            with contextlib.suppress(OSError):
                self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _release_spare_fd(self) -> None:
        if self._spare_fd is not None:
            os.close(self._spare_fd)
            self._spare_fd = None

    # Called in a thread of the pool.

    def _serve(self, connection: Connection) -> None:
        try:
            connection.sock = self._access.wrap(connection.sock)
            self._handle(connection)
        except OSError:
            pass  # the client closed it, its TLS handshake failed, or a deadline passed
        except Exception:
            _log.exception("an HTTP request failed", extra={"event": "http"})
        finally:
            with self._lock:
                self._open.pop(connection, None)
            self.shutdown_request(connection.sock)
