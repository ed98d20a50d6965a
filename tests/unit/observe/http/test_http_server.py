"""The HTTP server with valid, invalid and hostile clients, over real sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time

import pytest
from prometheus_client import CollectorRegistry, Gauge

from lightyear_node.observe.http import connections
from lightyear_node.observe.http.connections import CONNECTIONS_MAX, HEALTH_RESERVE, PER_ADDRESS_MAX
from lightyear_node.observe.http.server import HEADERS, METRICS, Request, Response, metrics_route
from tests.support.descriptor_exhaustion import no_descriptors
from tests.support.raw_http import (
    DEADLINE_S,
    accepts_more,
    connect,
    exchange,
    get_status,
    read_all,
    serving,
    wait_until,
)

# Valid requests.


def test_every_response_has_the_security_headers() -> None:
    with serving() as server:
        for sent, status in [
            (b"GET /echo HTTP/1.0\r\n\r\n", 200),
            (b"GET /nothing HTTP/1.0\r\n\r\n", 404),
            (b"POST /echo HTTP/1.0\r\n\r\n", 405),
            (b"rubbish\r\n", 400),
        ]:
            found, headers, body = exchange(server, sent)
            assert found == status
            assert HEADERS.items() <= headers.items()
            assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
            assert "Python" not in headers["Server"]
            assert int(headers["Content-Length"]) == len(body)


def test_a_route_can_override_headers() -> None:
    policy = {"Content-Security-Policy": "default-src 'self'"}
    page = Response(b"<html>", "text/html", headers=policy)
    with serving(lambda request: page if request.path == "/" else None) as server:
        _, headers, _ = exchange(server, b"GET / HTTP/1.0\r\n\r\n")
        assert headers["Content-Security-Policy"] == "default-src 'self'"
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_head_returns_the_headers_of_get_without_body() -> None:
    with serving() as server:
        status, headers, body = exchange(server, b"GET /echo?a=b HTTP/1.0\r\nAccept: x\r\n\r\n")
        assert json.loads(body) == {"query": "a=b"}
        other = exchange(server, b"HEAD /echo?a=b HTTP/1.0\r\nAccept: x\r\n\r\n")
        assert (other[0], other[2]) == (status, b"")
        assert other[1]["Content-Length"] == headers["Content-Length"]


def test_a_standard_client_works() -> None:
    with serving() as server:
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
        for _ in range(3):  # it reconnects: the server closes after each response
            client.request("GET", "/livez")
            assert client.getresponse().read() == b'{"ok": true, "problems": []}\n'


def test_a_request_may_arrive_in_single_bytes() -> None:
    with serving() as server, connect(server) as sock:
        for byte in b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n":
            sock.sendall(bytes([byte]))
        assert read_all(sock).startswith(b"HTTP/1.1 200 OK\r\n")


# Invalid requests.


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /livez\r\n", 400),  # HTTP/0.9
        (b"GET /livez HTTP/2.0\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\n\n", 400),
        (b"GET  /livez HTTP/1.1\r\n\r\n", 400),
        (b"GET /li\x00vez HTTP/1.1\r\n\r\n", 400),
        (b"GET /liv\xc3\xa9z HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\n", 400),  # TLS to a port without TLS
        (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414),
        (b"GET /echo?" + b"a" * 1_000_000, 414),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 1000 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 1_000_000, 431),
        (b"GET /../../etc/passwd HTTP/1.0\r\n\r\n", 404),
        (b"GET /livez/ HTTP/1.0\r\n\r\n", 404),
        (b"GET http://evil.example/livez HTTP/1.0\r\n\r\n", 404),
        (b"POST /livez HTTP/1.0\r\nContent-Length: 60000\r\n\r\n" + b"x" * 60_000, 405),
        (b"DELETE /livez HTTP/1.0\r\n\r\n", 405),
        (b"OPTIONS * HTTP/1.0\r\n\r\n", 405),
        (b"CONNECT evil.example:443 HTTP/1.0\r\n\r\n", 405),
        (b"get /livez HTTP/1.0\r\n\r\n", 405),
        (b"GET /livez HTTP/1.1\r\n\r\n", 421),  # without a Host
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 421),
        (b"", 0),
        (b"GET /livez HTTP/1.1\r\nHost: loc", 0),
    ],
)
def test_invalid_requests_are_refused_with_a_status(
    sent: bytes, status: int, quiet: pytest.LogCaptureFixture
) -> None:
    with serving() as server:
        with connect(server) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(sent)
            if status == 0:
                sock.shutdown(socket.SHUT_WR)
            answer = read_all(sock)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode() if status else b"")
        assert bool(answer) == bool(status)
        assert get_status(server, "/livez") == 200


def test_405_names_the_allowed_methods() -> None:
    with serving() as server:
        assert exchange(server, b"PUT / HTTP/1.0\r\n\r\n")[1]["Allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:9464", 200),
        ("127.0.0.1", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:9464", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("evil.example:9464", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost@evil.example", 421),
        ("localhost:evil", 421),
        ("", 421),
    ],
)
def test_dns_rebinding_is_refused(host: str, status: int) -> None:
    with serving() as server:
        assert get_status(server, "/livez", host=host) == status
        assert get_status(server, "/echo", host=host) == status


def test_a_failing_route_returns_500_without_details(caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: Request) -> Response | None:
        raise ZeroDivisionError("secret")

    def stuck(request: Request) -> Response | None:
        raise TimeoutError

    with serving(broken) as server:
        status, _, body = exchange(server, b"GET /livez HTTP/1.0\r\n\r\n")
    assert (status, body) == (500, b"internal error\n")
    assert "/livez could not be answered" in caplog.text
    with serving(stuck) as server:
        assert exchange(server, b"GET /livez HTTP/1.0\r\n\r\n")[0] == 503


# Limits.


def test_a_slow_request_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, quiet: pytest.LogCaptureFixture
) -> None:
    """Sending single bytes does not extend the deadline of the whole request."""
    monkeypatch.setattr(connections, "REQUEST_S", 0.5)
    with serving() as server, connect(server) as sock:
        sock.sendall(b"GET /livez HTTP/1.1\r\nX: ")
        wait_until(lambda: not accepts_more(sock))
        assert get_status(server, "/livez") == 200


def test_a_client_that_does_not_read_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, quiet: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "RESPONSE_S", 0.5)
    large = Response(bytes(64 << 20))
    with (
        serving(lambda request: large if request.path == "/large" else None) as server,
        connect(server) as sock,
    ):
        sock.sendall(b"GET /large HTTP/1.0\r\n\r\n")
        wait_until(lambda: not server.connections.open())
        assert len(read_all(sock)) < len(large.body)
        assert get_status(server, "/livez") == 200


def test_a_connection_flood_is_limited_and_leaves_no_threads(
    quiet: pytest.LogCaptureFixture,
) -> None:
    with serving() as server, contextlib.ExitStack() as clients:
        before = threading.active_count()
        for _ in range(PER_ADDRESS_MAX + 100):
            clients.enter_context(connect(server))
        wait_until(lambda: len(server.connections.open()) == PER_ADDRESS_MAX)
        assert threading.active_count() <= before + CONNECTIONS_MAX + HEALTH_RESERVE
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("http_")])


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.1\r\nHost: local"])
def test_incomplete_requests_are_evicted_for_new_ones(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 10 * DEADLINE_S)  # no deadline passes
    with serving() as server, contextlib.ExitStack() as clients:
        slow = [clients.enter_context(connect(server)) for _ in range(PER_ADDRESS_MAX)]
        for sock in slow:
            sock.sendall(sent)
        wait_until(lambda: len(server.connections.open()) == PER_ADDRESS_MAX)
        for path in ("/livez", "/echo") * CONNECTIONS_MAX:
            assert get_status(server, path) == 200
        # The oldest were closed without a response.
        assert read_all(slow[0]) == b""


def test_health_probes_work_while_all_connections_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 10 * DEADLINE_S)
    busy = threading.Event()

    def slow(request: Request) -> Response | None:
        if request.path == "/slow":
            busy.wait(DEADLINE_S)
        return None

    with serving(slow) as server, contextlib.ExitStack() as clients:
        clients.callback(busy.set)
        for _ in range(PER_ADDRESS_MAX):
            sock = clients.enter_context(connect(server))
            sock.sendall(b"GET /slow HTTP/1.0\r\n\r\n")
        wait_until(
            lambda: (
                [one.waiting for one in server.connections.open()]
                == [False] * len(server.connections.open())
                and len(server.connections.open()) == PER_ADDRESS_MAX
            )
        )
        # Idle connections in the health reserve do not block probes either.
        for _ in range(2 * HEALTH_RESERVE):
            clients.enter_context(connect(server))
        assert get_status(server, "/livez") == 200
        assert get_status(server, "/echo") == 503
        busy.set()
        wait_until(lambda: get_status(server, "/echo") == 200)


def test_health_probes_work_without_free_descriptors() -> None:
    with serving() as server:
        for _ in range(3):
            with socket.socket() as sock:
                sock.settimeout(DEADLINE_S)
                with no_descriptors():
                    sock.connect(("127.0.0.1", server.port))
                    sock.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
                    assert read_all(sock).startswith(b"HTTP/1.1 200 ")
            # After each connection, and before the next one, the server renews its reserve.
            for _ in range(2):
                assert get_status(server, "/livez") == 200


def test_closing_does_not_wait_for_clients() -> None:
    with serving() as server, connect(server) as sock:
        sock.sendall(b"GET /livez HTTP/1.1\r\n")
        wait_until(lambda: bool(server.connections.open()))
        server.close()
        assert read_all(sock) == b""
    wait_until(lambda: not server.connections.open())


def test_rendering_metrics_is_rate_limited() -> None:
    registry = CollectorRegistry()
    rendered = 0

    def render() -> float:
        nonlocal rendered
        rendered += 1
        deadline = time.thread_time() + 0.005  # some CPU time
        while time.thread_time() < deadline:
            pass
        return rendered

    Gauge("rendered", "How often.", registry=registry).set_function(render)
    with serving(metrics_route(registry)) as server:
        first = exchange(server, b"GET /metrics HTTP/1.0\r\n\r\n")
        assert first[1]["Content-Type"] == METRICS
        for _ in range(20):
            assert get_status(server, "/metrics") == 200
        assert rendered < 20
        wait_until(
            lambda: b"rendered 3.0\n" in exchange(server, b"GET /metrics HTTP/1.0\r\n\r\n")[2]
        )
