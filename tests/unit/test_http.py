"""The HTTP server under all kinds of clients, over real sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time

import pytest
from prometheus_client import CollectorRegistry, Gauge

from lightyear_node.observe import connections
from lightyear_node.observe.connections import PLACES_PER_ADDRESS
from lightyear_node.observe.http import HEADERS, METRICS, Answer, Request, metrics_route

from .visitors import DEADLINE_S, asked, connected, more_is_taken, said, serving, talk, until

# What is answered, and how.


def test_every_answer_bears_the_headers_that_keep_browsers_safe() -> None:
    with serving() as server:
        for sent, status in [
            (b"GET /echo HTTP/1.0\r\n\r\n", 200),
            (b"GET /nothing HTTP/1.0\r\n\r\n", 404),
            (b"POST /echo HTTP/1.0\r\n\r\n", 405),
            (b"rubbish\r\n", 400),
        ]:
            found, headers, body = talk(server, sent)
            assert found == status
            assert HEADERS.items() <= headers.items()
            assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
            assert "Python" not in headers["Server"]
            assert int(headers["Content-Length"]) == len(body)


def test_a_route_may_have_headers_of_its_own() -> None:
    policy = {"Content-Security-Policy": "default-src 'self'"}
    page = Answer(b"<html>", "text/html", headers=policy)
    with serving(lambda request: page if request.path == "/" else None) as server:
        _, headers, _ = talk(server, b"GET / HTTP/1.0\r\n\r\n")
        assert headers["Content-Security-Policy"] == "default-src 'self'"
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_head_is_get_without_its_body() -> None:
    with serving() as server:
        status, headers, body = talk(server, b"GET /echo?a=b HTTP/1.0\r\nAccept: x\r\n\r\n")
        assert json.loads(body) == {"query": "a=b", "accept": "x"}
        other = talk(server, b"HEAD /echo?a=b HTTP/1.0\r\nAccept: x\r\n\r\n")
        assert (other[0], other[2]) == (status, b"")
        assert other[1]["Content-Length"] == headers["Content-Length"]


def test_an_ordinary_client_is_understood() -> None:
    with serving() as server:
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
        for _ in range(3):  # it connects again, for we hang up after each
            client.request("GET", "/livez")
            assert client.getresponse().read() == b'{"ok": true, "problems": []}\n'


def test_a_question_may_come_in_pieces() -> None:
    with serving() as server, connected(server) as line:
        for letter in b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n":
            line.sendall(bytes([letter]))
        assert said(line).startswith(b"HTTP/1.1 200 OK\r\n")


# What is not.


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /livez\r\n", 400),  # HTTP/0.9
        (b"GET /livez HTTP/2.0\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\n\n", 400),
        (b"GET  /livez HTTP/1.1\r\n\r\n", 400),
        (b"GET /li\x00vez HTTP/1.1\r\n\r\n", 400),
        (b"GET /liv\xc3\xa9z HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\n", 400),  # TLS to a port without
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
def test_bad_requests_are_refused_in_words(
    sent: bytes, status: int, quiet: pytest.LogCaptureFixture
) -> None:
    with serving() as server:
        with connected(server) as line:
            with contextlib.suppress(ConnectionError):
                line.sendall(sent)
            if status == 0:
                line.shutdown(socket.SHUT_WR)
            answer = said(line)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode() if status else b"")
        assert bool(answer) == bool(status)
        assert asked(server, "/livez") == 200


def test_405_says_what_is_allowed() -> None:
    with serving() as server:
        assert talk(server, b"PUT / HTTP/1.0\r\n\r\n")[1]["Allow"] == "GET, HEAD"


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
def test_a_browser_led_here_under_another_name_gets_nothing(host: str, status: int) -> None:
    with serving() as server:
        assert asked(server, "/livez", host=host) == status
        assert asked(server, "/echo", host=host) == status


def test_a_route_that_fails_is_500_without_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: Request) -> Answer | None:
        raise ZeroDivisionError("secret")

    def stuck(request: Request) -> Answer | None:
        raise TimeoutError

    with serving(broken) as server:
        status, _, body = talk(server, b"GET /livez HTTP/1.0\r\n\r\n")
    assert (status, body) == (500, b"internal error\n")
    assert "/livez could not be answered" in caplog.text
    with serving(stuck) as server:
        assert talk(server, b"GET /livez HTTP/1.0\r\n\r\n")[0] == 503


# How much, and for how long.


def test_whoever_dawdles_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, quiet: pytest.LogCaptureFixture
) -> None:
    """A byte now and then does not help: the whole question has to be there in time."""
    monkeypatch.setattr(connections, "ASK_S", 0.5)
    with serving() as server, connected(server) as line:
        line.sendall(b"GET /livez HTTP/1.1\r\nX: ")
        until(lambda: not more_is_taken(line))
        assert asked(server, "/livez") == 200


def test_whoever_does_not_read_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, quiet: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "ANSWER_S", 0.5)
    large = Answer(bytes(64 << 20))
    with (
        serving(lambda request: large if request.path == "/large" else None) as server,
        connected(server) as line,
    ):
        line.sendall(b"GET /large HTTP/1.0\r\n\r\n")
        until(lambda: not server._connections._open)
        assert len(said(line)) < len(large.body)
        assert asked(server, "/livez") == 200


def test_a_crowd_is_turned_away_and_leaves_no_threads_behind(
    quiet: pytest.LogCaptureFixture,
) -> None:
    with serving() as server, contextlib.ExitStack() as crowd:
        before = threading.active_count()
        idle = [crowd.enter_context(connected(server)) for _ in range(PLACES_PER_ADDRESS)]
        until(lambda: len(server._connections._open) == PLACES_PER_ADDRESS)
        for _ in range(100):
            with connected(server) as line:
                answer = said(line)
                assert answer == b"" or answer.startswith(b"HTTP/1.0 503 ")
        assert threading.active_count() <= before + PLACES_PER_ADDRESS
        idle[0].close()
        until(lambda: asked(server, "/livez") == 200)
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("http_")])


def test_closing_does_not_wait_for_anybody() -> None:
    with serving() as server, connected(server) as line:
        line.sendall(b"GET /livez HTTP/1.1\r\n")
        until(lambda: bool(server._connections._open))
        server.close()
        assert said(line) == b""
    until(lambda: not server._connections._open)


def test_metrics_are_not_written_down_more_often_than_that_is_worth() -> None:
    registry = CollectorRegistry()
    looked = 0

    def look() -> float:
        nonlocal looked
        looked += 1
        ends_at = time.thread_time() + 0.005  # it costs something
        while time.thread_time() < ends_at:
            pass
        return looked

    Gauge("looked", "How often.", registry=registry).set_function(look)
    with serving(metrics_route(registry)) as server:
        first = talk(server, b"GET /metrics HTTP/1.0\r\n\r\n")
        assert first[1]["Content-Type"] == METRICS
        for _ in range(20):
            assert asked(server, "/metrics") == 200
        assert looked < 20
        until(lambda: b"looked 3.0\n" in talk(server, b"GET /metrics HTTP/1.0\r\n\r\n")[2])
