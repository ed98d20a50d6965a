"""HTTP for monitoring and the node's page, on loopback.

Runs in threads of its own, so it answers also when the event loop does not; that is the point of
`/livez`.  Read-only: no route changes anything.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from lightyear_node.errors import ConfigError

REQUEST_TIMEOUT_S = 5.0
TEXT = "text/plain; charset=utf-8"
JSON = "application/json"

Health = Callable[[], list[str]]
"""What is wrong, in words; an empty list when all is well."""


@dataclass(frozen=True, slots=True)
class Request:
    path: str
    query: str
    accept: str


@dataclass(frozen=True, slots=True)
class Answer:
    body: bytes
    kind: str = JSON
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


Route = Callable[[Request], Answer | None]
"""Answers the requests that are its own, and to all others None; called from several threads."""


def metrics_route(registry: CollectorRegistry) -> Route:
    def answer(request: Request) -> Answer | None:
        if request.path != "/metrics":
            return None
        encode, kind = choose_encoder(request.accept)
        return Answer(encode(registry), kind)

    return answer


def health_route(path: str, check: Health) -> Route:
    def answer(request: Request) -> Answer | None:
        if request.path != path:
            return None
        problems = check()
        return as_json({"ok": not problems, "problems": problems}, 503 if problems else 200)

    return answer


def as_json(plain: Any, status: int = 200) -> Answer:
    return Answer(json.dumps(plain).encode() + b"\n", JSON, status)


class HttpServer:
    def __init__(self, listen: str, routes: Sequence[Route]) -> None:
        host, _, port = listen.rpartition(":")
        if host not in ("127.0.0.1", "localhost", "[::1]"):
            raise ConfigError(
                f"http.listen is {listen}, which other machines can reach",
                hint="use 127.0.0.1 and a reverse proxy with authentication in front of it",
            )

        class Handler(_Handler):
            pass

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if host == "[::1]" else socket.AF_INET
            daemon_threads = True
            allow_reuse_port = False

        Handler.routes = routes
        try:
            self._server = Server((host.strip("[]"), int(port)), Handler)
        except OSError as problem:
            raise ConfigError(
                f"http.listen: cannot listen on {listen}: {problem.strerror}",
                hint="another node may use that port: set another `http.listen` in node.yaml",
            ) from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    routes: Sequence[Route]
    timeout = REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        request = Request(path, query, self.headers.get("Accept", ""))
        answers = (route(request) for route in self.routes)
        nothing = Answer(b"try /metrics, /livez or /readyz\n", TEXT, 404)
        self._answer(next((answer for answer in answers if answer is not None), nothing))

    def _answer(self, answer: Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is not an event."""
