"""HTTP server for monitoring and the dashboard; on loopback unless TLS or a token is configured.

Runs in its own threads, so that `/livez` works when the event loop hangs.  Read-only: no route
changes anything.  Every request is limited in threads, bytes and time; invalid ones get a status of
the 400s or no response.
"""

from __future__ import annotations

import http.client
import io
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from lightyear_node.errors import Shortage
from lightyear_node.observe.http.auth import PUBLIC_PATHS, AccessFiles, HttpAccess
from lightyear_node.observe.http.connections import Connection, Connections

HEAD_BYTES_MAX = 16 << 10
"""Request line and headers together; browsers send 1 to 2 kB."""
REQUEST_LINE_BYTES_MAX = 4 << 10
DISCARD_BYTES_MAX = 64 << 10
DISCARD_S = 0.5
"""Limits for discarding what follows a refused request: closing at once would reset the connection
before the client has read the response."""
METRICS_SHARE_MAX = 0.005
"""Maximum share of a core for rendering metrics, however often they are requested..."""
METRICS_AGE_MAX_S = 1.0
"""...unless the cached metrics are older than this."""

TEXT = "text/plain; charset=utf-8"
JSON = "application/json"
METRICS = "text/plain; version=0.0.4; charset=utf-8"
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Default headers of every response."""

_REQUEST_LINE = re.compile(r"([A-Za-z]+) ([!-~]+) (HTTP/1\.[01])")

_log = logging.getLogger(__name__)

Health = Callable[[], list[str]]
"""Returns the current problems; an empty list if healthy."""


@dataclass(frozen=True, slots=True)
class Request:
    path: str
    query: str
    trusted: bool = True
    """Whether it carries the token, or none is configured; others may only probe health."""


@dataclass(frozen=True, slots=True)
class Response:
    body: bytes
    kind: str = JSON
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    """Added to the default headers, or replacing them."""


Route = Callable[[Request], Response | None]
"""Returns None for requests of other routes; called from several threads."""


def metrics_route(registry: CollectorRegistry) -> Route:
    lock = threading.Lock()
    text, due = b"", 0.0

    def respond(request: Request) -> Response | None:
        nonlocal text, due
        if request.path != "/metrics":
            return None
        with lock:
            if time.monotonic() >= due:
                began = time.thread_time()
                text = generate_latest(registry)
                spent_s = time.thread_time() - began
                due = time.monotonic() + min(spent_s / METRICS_SHARE_MAX, METRICS_AGE_MAX_S)
            return Response(text, METRICS)

    return respond


def health_route(path: str, check: Health) -> Route:
    def respond(request: Request) -> Response | None:
        if request.path != path:
            return None
        problems = check()
        plain: dict[str, Any] = {"ok": not problems}
        if request.trusted:
            plain["problems"] = problems
        return as_json(plain, 503 if problems else 200)

    return respond


def as_json(plain: Any, status: int = 200) -> Response:
    return Response(json.dumps(plain).encode() + b"\n", JSON, status)


class HttpServer:
    """`on_denied` is called for every request that lacks the token."""

    def __init__(
        self,
        listen: str,
        routes: Sequence[Route],
        files: AccessFiles | None = None,
        on_denied: Callable[[], None] = lambda: None,
    ) -> None:
        self._access = HttpAccess(listen, files or AccessFiles())
        self._routes = routes
        self._on_denied = on_denied
        self.connections = Connections(self._access, self._handle)
        self.port = self.connections.port
        self.address = f"{self._access.scheme}://{listen}"
        self.warning = self._access.warning

    def close(self) -> None:
        self.connections.close()

    def _handle(self, connection: Connection) -> None:
        """Read one request and send one response."""
        method = "GET"
        try:
            head = _RequestHead.read(connection)
            method = head.method
            response = self._respond(head, connection.health_only)
        except _HttpRefusal as refusal:
            response = refusal.response
        connection.sock.sendall(_encode(response, body=method != "HEAD"))
        if response.status >= 400:
            _discard_rest(connection)

    def _respond(self, head: _RequestHead, health_only: bool) -> Response:
        if head.method not in ("GET", "HEAD"):
            raise _HttpRefusal(405, "only GET and HEAD", {"Allow": "GET, HEAD"})
        if not self._access.allows_host(head.values("Host"), head.version):
            raise _HttpRefusal(421, "the Host header does not name this node")
        path, _, query = head.target.partition("?")
        if health_only and path not in PUBLIC_PATHS:
            raise _HttpRefusal(503, "too many connections")
        trusted = self._access.allows_token(head.values("Authorization"))
        if not trusted and path not in PUBLIC_PATHS:
            self._on_denied()
            scheme = {"WWW-Authenticate": 'Basic realm="lightyear-node"'}
            raise _HttpRefusal(401, "the token is missing or wrong", scheme)
        request = Request(path, query, trusted)
        try:
            responses = (route(request) for route in self._routes)
            found = next((response for response in responses if response is not None), None)
        except (TimeoutError, Shortage):
            raise _HttpRefusal(503, "the node is busy") from None
        except Exception:
            _log.exception("%s could not be answered", path, extra={"event": "http"})
            raise _HttpRefusal(500, "internal error") from None
        if found is None:
            raise _HttpRefusal(404, "try /, /metrics, /livez or /readyz")
        return found


class _HttpRefusal(Exception):
    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.response = Response(text.encode() + b"\n", TEXT, status, headers or {})


@dataclass(frozen=True, slots=True)
class _RequestHead:
    """Request line and headers; a body is ignored."""

    method: str
    target: str
    version: str
    headers: http.client.HTTPMessage

    def values(self, name: str) -> list[str]:
        return [str(value) for value in self.headers.get_all(name, [])]

    @classmethod
    def read(cls, connection: Connection) -> _RequestHead:
        head = b""
        while b"\r\n\r\n" not in head:
            chunk = connection.sock.recv(HEAD_BYTES_MAX)
            if not chunk:
                raise ConnectionError("closed by the client")
            head += chunk
            if b"\n" in head:
                cls._request_line(head)  # refuse an invalid one at once
            elif len(head) > REQUEST_LINE_BYTES_MAX:
                raise _HttpRefusal(414, "the request line is too long")
            if len(head) > HEAD_BYTES_MAX:
                raise _HttpRefusal(431, "the headers are too long")
        method, target, version = cls._request_line(head)
        try:
            headers = http.client.parse_headers(io.BytesIO(head.partition(b"\r\n")[2]))
        except http.client.HTTPException:
            raise _HttpRefusal(431, "too many headers") from None
        connection.request_complete()
        return cls(method, target, version, headers)

    @staticmethod
    def _request_line(head: bytes) -> tuple[str, str, str]:
        line = head.partition(b"\n")[0]
        if len(line) > REQUEST_LINE_BYTES_MAX:
            raise _HttpRefusal(414, "the request line is too long")
        match = _REQUEST_LINE.fullmatch(line.removesuffix(b"\r").decode("latin-1"))
        if match is None or not line.endswith(b"\r"):
            raise _HttpRefusal(400, "this is not HTTP/1.0 or HTTP/1.1")
        return match[1], match[2], match[3]


def _encode(response: Response, *, body: bool) -> bytes:
    status = HTTPStatus(response.status)
    headers = {
        "Server": "lightyear-node",
        "Date": formatdate(usegmt=True),
        "Content-Type": response.kind,
        "Content-Length": str(len(response.body)),
        "Connection": "close",
        **HEADERS,
        **response.headers,
    }
    lines = [f"HTTP/1.1 {status.value} {status.phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    return head + response.body if body else head


def _discard_rest(connection: Connection) -> None:
    """Read and discard what the client still sends, such as a body, within limits."""
    sock = connection.sock
    socket.socket.shutdown(sock, socket.SHUT_WR)
    sock.settimeout(DISCARD_S)
    deadline = time.monotonic() + DISCARD_S
    discarded = 0
    while discarded < DISCARD_BYTES_MAX and time.monotonic() < deadline:
        chunk = sock.recv(DISCARD_BYTES_MAX)
        if not chunk:
            return
        discarded += len(chunk)
