"""The HTTP server under all kinds of clients, over real sockets."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from lightyear_node.errors import ConfigError
from lightyear_node.identity import make_identity
from lightyear_node.observe import connections
from lightyear_node.observe.access import Keys
from lightyear_node.observe.connections import PLACES_PER_ADDRESS
from lightyear_node.observe.http import (
    HEADERS,
    METRICS,
    Answer,
    HttpServer,
    Request,
    Route,
    as_json,
    health_route,
    metrics_route,
)

DEADLINE_S = 20.0
TOKEN = "0123456789abcdef" * 4
WIDE = "0.0.0.0:0"


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


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Nothing that strangers send is worth a word in the log."""
    with caplog.at_level(logging.INFO):
        yield caplog
    assert not caplog.records


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    return private(tmp_path / "token", TOKEN + "\n")


def private(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(0o600)
    return path


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    identity = make_identity("site-a", datetime.now(UTC))
    (tmp_path / "http.crt").write_bytes(identity.certificate.pem)
    return tmp_path / "http.crt", private(tmp_path / "http.key", identity.tls_key_pem)


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


# Other machines.


def test_other_machines_need_tls_or_a_token(token_file: Path) -> None:
    for listen in (WIDE, "[::]:0", "node.hospital.example:0"):
        with pytest.raises(ConfigError, match="other machines can reach") as refused:
            HttpServer(listen, [])
        assert "http.token_file" in str(refused.value.hint)
    with serving(listen=WIDE, keys=Keys(token=token_file)) as server:
        assert server.warning is not None
        assert "unencrypted" in server.warning
    with serving() as server:
        assert server.warning is None


def test_an_address_of_another_machine_is_a_clear_error(token_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:9464") as refused:
        HttpServer("192.0.2.1:9464", [], Keys(token=token_file))
    assert "an address of this machine" in str(refused.value.hint)


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"anybody:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (f"Authorization: Bearer {TOKEN}", 200),
        (f"authorization: bearer {TOKEN}", 200),
        (f"Authorization: {basic(TOKEN)}", 200),
        ("X: y", 401),
        ("Authorization:", 401),
        ("Authorization: Bearer", 401),
        (f"Authorization: Bearer {TOKEN[:-1]}", 401),
        (f"Authorization: Bearer {TOKEN}x", 401),
        (f"Authorization: {TOKEN}", 401),
        (f"Authorization: {basic(TOKEN[:-1])}", 401),
        ("Authorization: Basic ???", 401),
        (f"Authorization: Bearer {TOKEN}\r\nAuthorization: Bearer {TOKEN}", 401),
    ],
)
def test_the_token_opens_everything_and_health_needs_none(
    header: str, status: int, token_file: Path
) -> None:
    denied: list[bool] = []
    with serving(
        listen=WIDE, keys=Keys(token=token_file), on_denied=lambda: denied.append(True)
    ) as server:
        assert asked(server, "/echo", header, host="node.hospital.example") == status
        assert len(denied) == (status == 401)
        assert asked(server, "/nothing", header) == (404 if status == 200 else 401)
        assert asked(server, "/livez", header) == 200
        answered, _, body = talk(server, f"GET /readyz HTTP/1.0\r\n{header}\r\n\r\n".encode())
        assert answered == 503
        assert (b"a secret" in body) == (status == 200), "only who brings the token hears why"


def test_the_token_is_wanted_on_loopback_too(token_file: Path) -> None:
    with serving(keys=Keys(token=token_file)) as server:
        assert asked(server, "/echo") == 401
        assert asked(server, "/echo", f"Authorization: Bearer {TOKEN}") == 200


def test_a_changed_token_counts_at_once(token_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, new = f"Authorization: Bearer {TOKEN}", f"Authorization: Bearer {TOKEN[::-1]}"
    with serving(keys=Keys(token=token_file)) as server:
        assert asked(server, "/echo", old) == 200
        private(token_file.with_suffix(".new"), TOKEN[::-1]).replace(token_file)
        assert [asked(server, "/echo", one) for one in (old, new)] == [401, 200]
        # What cannot be used is no reason to go on with what is no longer wanted.
        token_file.unlink()
        assert [asked(server, "/echo", one) for one in (old, new, new)] == [401, 401, 401]
        assert caplog.text.count("nobody is let in over HTTP") == 1
        private(token_file, TOKEN)
        assert asked(server, "/echo", old) == 200


@pytest.mark.parametrize(
    ("content", "mode", "about"),
    [
        (TOKEN, 0o644, "can be read by others"),
        (TOKEN, 0o640, "can be read by others"),
        ("short", 0o600, "has 5 characters"),
        ("", 0o600, "has 0 characters"),
        ("x" * 5000, 0o600, "characters"),
        (f"{TOKEN} {TOKEN}", 0o600, "more than one word"),
        ("é" * 40, 0o600, "more than one word"),
    ],
)
def test_a_bad_token_file_is_refused_at_the_start(
    content: str, mode: int, about: str, tmp_path: Path
) -> None:
    path = private(tmp_path / "token", content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=about) as refused:
        HttpServer("127.0.0.1:0", [], Keys(token=path))
    assert refused.value.hint


def test_a_token_file_that_is_missing_or_a_link_is_refused(token_file: Path) -> None:
    with pytest.raises(ConfigError, match="is missing") as refused:
        HttpServer("127.0.0.1:0", [], Keys(token=token_file.with_name("none")))
    assert "openssl rand" in str(refused.value.hint)
    link = token_file.with_name("link")
    link.symlink_to(token_file)
    with pytest.raises(ConfigError, match="symbolic link"):
        HttpServer("127.0.0.1:0", [], Keys(token=link))


def over_tls(server: HttpServer, certificate: Path, path: str) -> int:
    context = ssl.create_default_context(cafile=str(certificate))
    context.check_hostname = False
    client = http.client.HTTPSConnection(
        "127.0.0.1", server.port, timeout=DEADLINE_S, context=context
    )
    client.request("GET", path)
    return client.getresponse().status


def test_tls_is_spoken_and_its_certificate_can_be_renewed(
    certificate: tuple[Path, Path], quiet: pytest.LogCaptureFixture
) -> None:
    with serving(listen=WIDE, keys=Keys(*certificate)) as server:
        assert server.address.startswith("https://")
        assert server.warning is not None
        assert "everybody in this network" in server.warning
        assert over_tls(server, certificate[0], "/echo") == 200
        # In plain words there is no answer, and nobody is held up.
        with connected(server) as line:
            line.sendall(b"GET /echo HTTP/1.0\r\n\r\n")
            assert not said(line).startswith(b"HTTP")
        renewed = make_identity("site-a", datetime.now(UTC))
        os.replace(private(certificate[1].with_suffix(".new"), renewed.tls_key_pem), certificate[1])
        certificate[0].write_bytes(renewed.certificate.pem)
        assert over_tls(server, certificate[0], "/echo") == 200


def test_whoever_dawdles_in_the_handshake_is_cut_off(
    certificate: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    quiet: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(connections, "ASK_S", 0.5)
    with serving(listen=WIDE, keys=Keys(*certificate)) as server, connected(server) as line:
        line.sendall(b"\x16\x03\x01")
        until(lambda: bool(server._connections._open))
        assert said(line) == b""
        until(lambda: not server._connections._open)
        assert over_tls(server, certificate[0], "/livez") == 200


def test_bad_certificates_are_refused_at_the_start(certificate: tuple[Path, Path]) -> None:
    public, key = certificate
    other = make_identity("site-b", datetime.now(UTC))
    strange = private(key.with_name("strange.key"), other.tls_key_pem)
    for keys, about in [
        (Keys(public, strange), "cannot be used"),
        (Keys(key, key), "cannot be used"),
        (Keys(public, key.with_name("none")), "is missing"),
        (Keys(public.with_name("none"), key), "is missing"),
    ]:
        with pytest.raises(ConfigError, match=about) as refused:
            HttpServer("127.0.0.1:0", [], keys)
        assert refused.value.hint
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        HttpServer("127.0.0.1:0", [], Keys(public, key))
