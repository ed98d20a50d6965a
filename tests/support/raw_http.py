"""An HTTP server, and clients that send arbitrary bytes to it, over real sockets."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

from lightyear_node.observe.http.auth import AccessFiles
from lightyear_node.observe.http.server import (
    HttpServer,
    Request,
    Response,
    Route,
    as_json,
    health_route,
)

DEADLINE_S = 20.0


def echo(request: Request) -> Response | None:
    if request.path != "/echo":
        return None
    return as_json({"query": request.query})


@contextlib.contextmanager
def serving(
    *routes: Route,
    listen: str = "127.0.0.1:0",
    files: AccessFiles | None = None,
    on_denied: Callable[[], None] = lambda: None,
) -> Iterator[HttpServer]:
    health = [health_route("/livez", list), health_route("/readyz", lambda: ["a secret"])]
    server = HttpServer(listen, [*routes, echo, *health], files, on_denied)
    try:
        yield server
    finally:
        server.close()


def connect(server: HttpServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), DEADLINE_S)


def read_all(sock: socket.socket) -> bytes:
    """Read until the other side closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := sock.recv(65536):
            received += chunk
    return received


def exchange(server: HttpServer, sent: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send raw bytes and return status, headers and body; status 0 for no response."""
    with connect(server) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(sent)
        answer = read_all(sock)
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return int(first.split()[1]) if first else 0, headers, body


def get_status(server: HttpServer, path: str, *headers: str, host: str = "localhost") -> int:
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", *headers, "", ""]
    return exchange(server, "\r\n".join(lines).encode())[0]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.02)


def accepts_more(sock: socket.socket) -> bool:
    try:
        sock.sendall(b"a")
    except ConnectionError:
        return False
    return True
