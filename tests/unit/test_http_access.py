"""Who reaches the HTTP server from other machines: tokens and TLS, over real sockets."""

from __future__ import annotations

import base64
import http.client
import os
import ssl
from datetime import UTC, datetime
from pathlib import Path

import pytest

from lightyear_node.errors import ConfigError
from lightyear_node.identity import make_identity
from lightyear_node.observe import connections
from lightyear_node.observe.access import Keys
from lightyear_node.observe.http import HttpServer

from .visitors import DEADLINE_S, asked, connected, said, serving, talk, until

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
