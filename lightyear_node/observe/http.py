"""HTTP for monitoring and the node's page, on loopback unless there is TLS or a token.

Runs in threads of its own, so it answers also when the event loop does not; that is the point of
`/livez`.  Read-only: no route changes anything.  Whatever is sent here costs a bounded number of
threads, bytes and seconds, and gets an answer of the 400s or none.
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

from lightyear_node.observe.access import PUBLIC_PATHS, Access, Keys
from lightyear_node.observe.connections import Connection, Connections

HEAD_BYTES_MAX = 16 << 10
"""Request line and headers together; browsers send one or two thousand."""
REQUEST_LINE_BYTES_MAX = 4 << 10
UNREAD_BYTES_MAX = 64 << 10
UNREAD_S = 0.5
"""How much of what follows a bad request, and for how long, is taken in and thrown away: hanging up
on it would take the answer back."""
METRICS_SHARE_MAX = 0.005
"""Of a core: writing the metrics down takes no more, however often they are asked for..."""
METRICS_AGE_MAX_S = 1.0
"""...unless what is told would be older than this."""

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
"""Of every answer, unless it has its own."""

_REQUEST_LINE = re.compile(r"([A-Za-z]+) ([!-~]+) (HTTP/1\.[01])")

_log = logging.getLogger(__name__)

Health = Callable[[], list[str]]
"""What is wrong, in words; an empty list when all is well."""


@dataclass(frozen=True, slots=True)
class Request:
    path: str
    query: str
    accept: str
    trusted: bool = True
    """Whether it brought the token, where there is one; others can ask for health only."""


@dataclass(frozen=True, slots=True)
class Answer:
    body: bytes
    kind: str = JSON
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    """Besides, and instead of, those that every answer has."""


Route = Callable[[Request], Answer | None]
"""Answers the requests that are its own, and to all others None; called from several threads."""


def metrics_route(registry: CollectorRegistry) -> Route:
    lock = threading.Lock()
    text, due = b"", 0.0

    def answer(request: Request) -> Answer | None:
        nonlocal text, due
        if request.path != "/metrics":
            return None
        with lock:
            if time.monotonic() >= due:
                began = time.thread_time()
                text = generate_latest(registry)
                spent_s = time.thread_time() - began
                due = time.monotonic() + min(spent_s / METRICS_SHARE_MAX, METRICS_AGE_MAX_S)
            return Answer(text, METRICS)

    return answer


def health_route(path: str, check: Health) -> Route:
    def answer(request: Request) -> Answer | None:
        if request.path != path:
            return None
        problems = check()
        told: dict[str, Any] = {"ok": not problems}
        if request.trusted:
            told["problems"] = problems
        return as_json(told, 503 if problems else 200)

    return answer


def as_json(plain: Any, status: int = 200) -> Answer:
    return Answer(json.dumps(plain).encode() + b"\n", JSON, status)


class HttpServer:
    """`on_denied` is called for every request that lacks the token."""

    def __init__(
        self,
        listen: str,
        routes: Sequence[Route],
        keys: Keys | None = None,
        on_denied: Callable[[], None] = lambda: None,
    ) -> None:
        self._access = Access(listen, keys or Keys())
        self._routes = routes
        self._on_denied = on_denied
        self._connections = Connections(self._access, self._converse)
        self.port = self._connections.port
        self.address = f"{self._access.scheme}://{listen}"
        self.warning = self._access.warning

    def close(self) -> None:
        self._connections.close()

    def _converse(self, connection: Connection) -> None:
        """One question, one answer."""
        line, method = connection.line, "GET"
        try:
            asked = _Asked.read(connection)
            method = asked.method
            answer = self._respond(asked)
        except _Refused as refused:
            answer = refused.answer
        line.sendall(_written(answer, body=method != "HEAD"))
        if answer.status >= 400:
            _let_finish(connection)

    def _respond(self, asked: _Asked) -> Answer:
        if asked.method not in ("GET", "HEAD"):
            raise _Refused(405, "only GET and HEAD", {"Allow": "GET, HEAD"})
        if not self._access.is_for_us(asked.values("Host"), asked.version):
            raise _Refused(421, "this node is not what your Host header names")
        path, _, query = asked.target.partition("?")
        trusted = self._access.admits(asked.values("Authorization"))
        if not trusted and path not in PUBLIC_PATHS:
            self._on_denied()
            wanted = {"WWW-Authenticate": 'Basic realm="lightyear-node"'}
            raise _Refused(401, "the token is missing or wrong", wanted)
        request = Request(path, query, ", ".join(asked.values("Accept")), trusted)
        try:
            answers = (route(request) for route in self._routes)
            found = next((answer for answer in answers if answer is not None), None)
        except TimeoutError:
            raise _Refused(503, "the node is busy") from None
        except Exception:
            _log.exception("%s could not be answered", path, extra={"event": "http"})
            raise _Refused(500, "internal error") from None
        if found is None:
            raise _Refused(404, "try /, /metrics, /livez or /readyz")
        return found


class _Refused(Exception):
    def __init__(self, status: int, about: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(about)
        self.answer = Answer(about.encode() + b"\n", TEXT, status, headers or {})


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a client has written before its body, in which nobody is interested."""

    method: str
    target: str
    version: str
    headers: http.client.HTTPMessage

    def values(self, name: str) -> list[str]:
        return [str(value) for value in self.headers.get_all(name, [])]

    @classmethod
    def read(cls, connection: Connection) -> _Asked:
        head = b""
        while b"\r\n\r\n" not in head:
            piece = connection.line.recv(HEAD_BYTES_MAX)
            if not piece:
                raise ConnectionError("it hung up")
            head += piece
            if b"\n" in head:
                cls._first_line(head)  # wrong ones need no second
            elif len(head) > REQUEST_LINE_BYTES_MAX:
                raise _Refused(414, "the request line is too long")
            if len(head) > HEAD_BYTES_MAX:
                raise _Refused(431, "the headers are too long")
        method, target, version = cls._first_line(head)
        try:
            headers = http.client.parse_headers(io.BytesIO(head.partition(b"\r\n")[2]))
        except http.client.HTTPException:
            raise _Refused(431, "too many headers") from None
        connection.asked()
        return cls(method, target, version, headers)

    @staticmethod
    def _first_line(head: bytes) -> tuple[str, str, str]:
        line = head.partition(b"\n")[0]
        if len(line) > REQUEST_LINE_BYTES_MAX:
            raise _Refused(414, "the request line is too long")
        match = _REQUEST_LINE.fullmatch(line.removesuffix(b"\r").decode("latin-1"))
        if match is None or not line.endswith(b"\r"):
            raise _Refused(400, "this is not HTTP/1.0 or HTTP/1.1")
        return match[1], match[2], match[3]


def _written(answer: Answer, *, body: bool) -> bytes:
    status = HTTPStatus(answer.status)
    headers = {
        "Server": "lightyear-node",
        "Date": formatdate(usegmt=True),
        "Content-Type": answer.kind,
        "Content-Length": str(len(answer.body)),
        "Connection": "close",
        **HEADERS,
        **answer.headers,
    }
    lines = [f"HTTP/1.1 {status.value} {status.phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    return head + answer.body if body else head


def _let_finish(connection: Connection) -> None:
    """Whoever still sends, such as a body, is heard out for a moment."""
    line = connection.line
    socket.socket.shutdown(line, socket.SHUT_WR)
    line.settimeout(UNREAD_S)
    ends_at = time.monotonic() + UNREAD_S
    taken = 0
    while taken < UNREAD_BYTES_MAX and time.monotonic() < ends_at:
        piece = line.recv(UNREAD_BYTES_MAX)
        if not piece:
            return
        taken += len(piece)
