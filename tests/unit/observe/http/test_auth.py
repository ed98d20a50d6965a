"""HTTP access from other machines: tokens and TLS, over real sockets."""

from __future__ import annotations

import base64
import http.client
import os
import ssl
from datetime import UTC, datetime
from pathlib import Path

import pytest

from lightyear_node.errors import ConfigError
from lightyear_node.identity.keys import make_identity
from lightyear_node.observe.http import connections
from lightyear_node.observe.http.auth import AccessFiles
from lightyear_node.observe.http.server import HttpServer
from tests.support.raw_http import (
    DEADLINE_S,
    connect,
    exchange,
    get_status,
    read_all,
    serving,
    wait_until,
)

TOKEN = "0123456789abcdef" * 4
WIDE = "0.0.0.0:0"


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


def test_other_machines_need_tls_or_a_token(token_file: Path) -> None:
    for listen in (WIDE, "[::]:0", "node.hospital.example:0"):
        with pytest.raises(ConfigError, match="other machines can reach") as refused:
            HttpServer(listen, [])
        assert "http.token_file" in str(refused.value.hint)
    with serving(listen=WIDE, files=AccessFiles(token=token_file)) as server:
        assert server.warning is not None
        assert "unencrypted" in server.warning
    with serving() as server:
        assert server.warning is None


def test_listening_on_an_address_of_another_machine_is_an_error(token_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:9464") as refused:
        HttpServer("192.0.2.1:9464", [], AccessFiles(token=token_file))
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
def test_all_paths_but_health_need_the_token(header: str, status: int, token_file: Path) -> None:
    denied: list[bool] = []
    with serving(
        listen=WIDE, files=AccessFiles(token=token_file), on_denied=lambda: denied.append(True)
    ) as server:
        assert get_status(server, "/echo", header, host="node.hospital.example") == status
        assert len(denied) == (status == 401)
        assert get_status(server, "/nothing", header) == (404 if status == 200 else 401)
        assert get_status(server, "/livez", header) == 200
        answered, _, body = exchange(server, f"GET /readyz HTTP/1.0\r\n{header}\r\n\r\n".encode())
        assert answered == 503
        assert (b"a secret" in body) == (status == 200), "problems are listed only with the token"


def test_the_token_is_required_on_loopback_too(token_file: Path) -> None:
    with serving(files=AccessFiles(token=token_file)) as server:
        assert get_status(server, "/echo") == 401
        assert get_status(server, "/echo", f"Authorization: Bearer {TOKEN}") == 200


def test_a_changed_token_takes_effect_at_once(
    token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = f"Authorization: Bearer {TOKEN}", f"Authorization: Bearer {TOKEN[::-1]}"
    with serving(files=AccessFiles(token=token_file)) as server:
        assert get_status(server, "/echo", old) == 200
        private(token_file.with_suffix(".new"), TOKEN[::-1]).replace(token_file)
        assert [get_status(server, "/echo", one) for one in (old, new)] == [401, 200]
        # While the file is invalid, the old token is not accepted either.
        token_file.unlink()
        assert [get_status(server, "/echo", one) for one in (old, new, new)] == [401, 401, 401]
        assert caplog.text.count("HTTP access is denied") == 1
        private(token_file, TOKEN)
        assert get_status(server, "/echo", old) == 200


@pytest.mark.parametrize(
    ("content", "mode", "about"),
    [
        (TOKEN, 0o644, "can be read by others"),
        (TOKEN, 0o640, "can be read by others"),
        ("short", 0o600, "has 5 characters"),
        ("", 0o600, "has 0 characters"),
        ("x" * 5000, 0o600, "characters"),
        (f"{TOKEN} {TOKEN}", 0o600, "must contain one word"),
        ("é" * 40, 0o600, "must contain one word"),
    ],
)
def test_an_invalid_token_file_prevents_the_start(
    content: str, mode: int, about: str, tmp_path: Path
) -> None:
    path = private(tmp_path / "token", content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=about) as refused:
        HttpServer("127.0.0.1:0", [], AccessFiles(token=path))
    assert refused.value.hint


def test_a_missing_or_symlinked_token_file_prevents_the_start(token_file: Path) -> None:
    with pytest.raises(ConfigError, match="is missing") as refused:
        HttpServer("127.0.0.1:0", [], AccessFiles(token=token_file.with_name("none")))
    assert "openssl rand" in str(refused.value.hint)
    link = token_file.with_name("link")
    link.symlink_to(token_file)
    with pytest.raises(ConfigError, match="symbolic link"):
        HttpServer("127.0.0.1:0", [], AccessFiles(token=link))


def over_tls(server: HttpServer, certificate: Path, path: str) -> int:
    context = ssl.create_default_context(cafile=str(certificate))
    context.check_hostname = False
    client = http.client.HTTPSConnection(
        "127.0.0.1", server.port, timeout=DEADLINE_S, context=context
    )
    client.request("GET", path)
    return client.getresponse().status


def test_tls_works_and_its_certificate_can_be_renewed(
    certificate: tuple[Path, Path], quiet: pytest.LogCaptureFixture
) -> None:
    with serving(listen=WIDE, files=AccessFiles(*certificate)) as server:
        assert server.address.startswith("https://")
        assert server.warning is not None
        assert "every machine in this network" in server.warning
        assert over_tls(server, certificate[0], "/echo") == 200
        # A request without TLS gets no HTTP response.
        with connect(server) as sock:
            sock.sendall(b"GET /echo HTTP/1.0\r\n\r\n")
            assert not read_all(sock).startswith(b"HTTP")
        renewed = make_identity("site-a", datetime.now(UTC))
        os.replace(private(certificate[1].with_suffix(".new"), renewed.tls_key_pem), certificate[1])
        certificate[0].write_bytes(renewed.certificate.pem)
        assert over_tls(server, certificate[0], "/echo") == 200


def test_a_slow_tls_handshake_is_cut_off(
    certificate: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    quiet: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 0.5)
    with serving(listen=WIDE, files=AccessFiles(*certificate)) as server, connect(server) as sock:
        sock.sendall(b"\x16\x03\x01")
        wait_until(lambda: bool(server.connections.open()))
        assert read_all(sock) == b""
        wait_until(lambda: not server.connections.open())
        assert over_tls(server, certificate[0], "/livez") == 200


def test_invalid_certificates_prevent_the_start(certificate: tuple[Path, Path]) -> None:
    public, key = certificate
    other = make_identity("site-b", datetime.now(UTC))
    foreign = private(key.with_name("foreign.key"), other.tls_key_pem)
    for files, about in [
        (AccessFiles(public, foreign), "cannot be used"),
        (AccessFiles(key, key), "cannot be used"),
        (AccessFiles(public, key.with_name("none")), "is missing"),
        (AccessFiles(public.with_name("none"), key), "is missing"),
    ]:
        with pytest.raises(ConfigError, match=about) as refused:
            HttpServer("127.0.0.1:0", [], files)
        assert refused.value.hint
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        HttpServer("127.0.0.1:0", [], AccessFiles(public, key))
