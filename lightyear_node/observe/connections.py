"""HTTP's connections: how many at once, of one address and in all, and for how long.

Owns threads and deadlines.  Must not know what is said; every conversation runs in a thread of a
fixed number, and one that takes too long ends because its connection does.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from lightyear_node.errors import ConfigError
from lightyear_node.observe.access import Access

PLACES = 32
PLACES_PER_ADDRESS = 16
"""So that one machine cannot keep others, and the probes of our own, from being heard."""
BACKLOG = 64
ASK_S = 5.0
"""From the connection to the end of the question, TLS included."""
ANSWER_S = 30.0
"""From there to the last byte of the answer."""
POLL_S = 0.25

_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Connection:
    line: socket.socket
    host: str
    ends_at: float = field(default_factory=lambda: time.monotonic() + ASK_S)

    def asked(self) -> None:
        """The question is here; the answer may take longer."""
        self.ends_at = time.monotonic() + ANSWER_S

    def cut(self) -> None:
        # Not the TLS connection's own way of ending, which is not for other threads to use.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.line, socket.SHUT_RDWR)


Converse = Callable[[Connection], None]
"""Holds one conversation, in a thread of its own."""


class Connections(socketserver.TCPServer):
    allow_reuse_address = True
    request_queue_size = BACKLOG

    def __init__(self, access: Access, converse: Converse) -> None:
        self._access = access
        self._converse = converse
        self._open: set[Connection] = set()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(PLACES, thread_name_prefix="http")
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
        with self._lock:
            for connection in self._open:
                connection.cut()
        # Whoever still waits for the node's loop, which may be the one that closes us, ends soon.
        self._threads.shutdown(wait=False, cancel_futures=True)

    # What the server calls, all in its one thread.

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(POLL_S)  # out of file descriptors, usually: asking at once would not help
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        connection = Connection(request, client_address[0])
        with self._lock:
            ours = sum(other.host == connection.host for other in self._open)
            full = len(self._open) >= PLACES or ours >= PLACES_PER_ADDRESS
            if not full:
                self._open.add(connection)
        if full:
            self._turn_away(request)
        else:
            self._threads.submit(self._attend, connection)

    def _turn_away(self, line: socket.socket) -> None:
        line.setblocking(False)
        if self._access.scheme == "http":
            with contextlib.suppress(OSError):
                line.send(_BUSY)
        self.shutdown_request(line)

    def service_actions(self) -> None:
        """After every connection, and a few times a second."""
        now = time.monotonic()
        with self._lock:
            late = [connection for connection in self._open if now > connection.ends_at]
        for connection in late:
            connection.cut()

    # In a thread of the pool.

    def _attend(self, connection: Connection) -> None:
        try:
            connection.line = self._access.secured(connection.line)
            self._converse(connection)
        except OSError:
            pass  # it hung up, spoke no TLS, or took too long
        except Exception:
            _log.exception("a conversation over HTTP failed", extra={"event": "http"})
        finally:
            with self._lock:
                self._open.discard(connection)
            self.shutdown_request(connection.line)
