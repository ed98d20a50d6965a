"""An HTTP server, and clients that say whatever they like to it, over real sockets."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

from lightyear_node.observe.access import Keys
from lightyear_node.observe.http import Answer, HttpServer, Request, Route, as_json, health_route

DEADLINE_S = 20.0


def echo(request: Request) -> Answer | None:
    if request.path != "/echo":
        return None
    return as_json({"query": request.query, "accept": request.accept})


@contextlib.contextmanager
def serving(
    *routes: Route,
    listen: str = "127.0.0.1:0",
    keys: Keys | None = None,
    on_denied: Callable[[], None] = lambda: None,
) -> Iterator[HttpServer]:
    health = [health_route("/livez", list), health_route("/readyz", lambda: ["a secret"])]
    server = HttpServer(listen, [*routes, echo, *health], keys, on_denied)
    try:
        yield server
    finally:
        server.close()


def connected(server: HttpServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), DEADLINE_S)


def said(line: socket.socket) -> bytes:
    """All that comes until the other side hangs up."""
    heard = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := line.recv(65536):
            heard += piece
    return heard


def talk(server: HttpServer, sent: bytes) -> tuple[int, dict[str, str], bytes]:
    """One raw request and its answer; status 0 for none."""
    with connected(server) as line:
        with contextlib.suppress(ConnectionError):
            line.sendall(sent)
        answer = said(line)
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return int(first.split()[1]) if first else 0, headers, body


def asked(server: HttpServer, path: str, *headers: str, host: str = "localhost") -> int:
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", *headers, "", ""]
    return talk(server, "\r\n".join(lines).encode())[0]


def until(condition: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < ends_at, "it never came to that"
        time.sleep(0.02)


def more_is_taken(line: socket.socket) -> bool:
    try:
        line.sendall(b"a")
    except ConnectionError:
        return False
    return True
