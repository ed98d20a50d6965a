"""Metrics and health over plain HTTP, on loopback: `/metrics`, `/livez`, `/readyz`.

Runs in its own thread, so it answers also when the event loop does not; that is the point of
`/livez`.  Read-only: no route changes anything.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from lightyear_node.errors import ConfigError

REQUEST_TIMEOUT_S = 5.0

Health = Callable[[], list[str]]
"""What is wrong, in words; an empty list when all is well."""


class HttpServer:
    def __init__(
        self, listen: str, registry: CollectorRegistry, *, alive: Health, ready: Health
    ) -> None:
        host, _, port = listen.rpartition(":")
        if host not in ("127.0.0.1", "localhost", "[::1]"):
            raise ConfigError(
                f"http.listen is {listen}, which other machines can reach",
                hint="use 127.0.0.1 and a reverse proxy with authentication in front of it",
            )

        class Handler(_Handler):
            checks = {"/livez": alive, "/readyz": ready}  # noqa: RUF012 - set once, never changed
            metrics = registry

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if host == "[::1]" else socket.AF_INET
            daemon_threads = True
            allow_reuse_port = False

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
    checks: dict[str, Health]
    metrics: CollectorRegistry
    timeout = REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, kind, encode(self.metrics))
        elif path in self.checks:
            problems = self.checks[path]()
            body = json.dumps({"ok": not problems, "problems": problems}) + "\n"
            self._answer(503 if problems else 200, "application/json", body.encode())
        else:
            self._answer(404, "text/plain; charset=utf-8", b"try /metrics, /livez or /readyz\n")

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is not an event."""
