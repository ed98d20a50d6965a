"""Who may ask over HTTP: nobody but this machine, unless there is TLS or a token.

Owns the decision and the files it rests on, which are read again when they change.  Must not know
what is asked, except that probes for health need no token.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import logging
import re
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from lightyear_node.errors import ConfigError
from lightyear_node.private_files import read_checked

TOKEN_LENGTH_MIN = 32
"""As many hexadecimal digits are 128 bits: nobody guesses that."""
TOKEN_LENGTH_MAX = 1024
PUBLIC_PATHS = ("/livez", "/readyz")
"""What a container's probes ask; without the token they hear yes or no, and nothing else."""

_LOCAL_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
_MAKE_TOKEN = "make one: (umask 077; openssl rand -hex 32 > FILE)"

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Keys:
    """The files that let other machines in."""

    certificate: Path | None = None
    key: Path | None = None
    token: Path | None = None


class Access:
    def __init__(self, listen: str, keys: Keys) -> None:
        host, _, port = listen.rpartition(":")
        # Not the other address of that name: it is what the name has always meant here.
        self.host = "127.0.0.1" if host == "localhost" else host.strip("[]")
        self.port = int(port)
        self.local = _is_loopback(self.host)
        self._tls: _Watched[ssl.SSLContext] | None = None
        self._token: _Watched[bytes] | None = None
        certificate, key, token = keys.certificate, keys.key, keys.token
        if not self.local and certificate is None and token is None:
            raise ConfigError(
                f"http.listen is {listen}, which other machines can reach",
                hint="set `http.token_file` or `http.tls` in node.yaml, or listen on 127.0.0.1",
            )
        if certificate is not None and key is not None:
            self._tls = _Watched((certificate, key), lambda: _tls_context(certificate, key))
        if token is not None:
            self._token = _Watched((token,), lambda: _read_token(token))

    @property
    def scheme(self) -> str:
        return "https" if self._tls is not None else "http"

    @property
    def warning(self) -> str | None:
        """What an operator should know about this way in."""
        if self.local:
            return None
        if self._tls is None:
            return (
                "http.listen: the token travels unencrypted, so that whoever sees this network's"
                " packets has it: set `http.tls`, unless you trust that network"
            )
        if self._token is None:
            return (
                "http.listen: without `http.token_file` everybody in this network can read the"
                " metrics and the page"
            )
        return None

    def secured(self, line: socket.socket) -> socket.socket:
        """What to talk over instead of this new connection; raises OSError if that fails."""
        if self._tls is None:
            return line
        context = self._tls.value()
        if context is None:
            raise ConnectionAbortedError("there is no certificate at the moment")
        return context.wrap_socket(line, server_side=True, do_handshake_on_connect=False)

    def is_for_us(self, hosts: Sequence[str], version: str) -> bool:
        """Whether a request names us, by its `Host`, as somebody on this machine would.

        A browser here can be led to us under another site's name, and would then let that site
        read the answer.  From other machines the token or the certificate keep that site out.
        """
        if not hosts:
            return version == "HTTP/1.0"
        if len(hosts) > 1:
            return False
        return not self.local or _LOCAL_HOST.fullmatch(hosts[0].strip()) is not None

    def admits(self, authorization: Sequence[str]) -> bool:
        """Whether a request brings the token, if there is one to bring."""
        if self._token is None:
            return True
        token = self._token.value()
        brought = _token_in(authorization[0]) if len(authorization) == 1 else None
        return token is not None and brought is not None and hmac.compare_digest(brought, token)


class _Watched(Generic[T]):
    """What is in some files; read again when they change.

    While they cannot be used there is nothing: the old is not what the operator wants any more.
    """

    def __init__(self, files: Sequence[Path], read: Callable[[], T]) -> None:
        self._files = files
        self._read = read
        self._lock = threading.Lock()
        self._mark = self._look()
        self._value: T | None = read()

    def value(self) -> T | None:
        with self._lock:
            mark = self._look()
            if mark != self._mark:
                self._mark = mark
                try:
                    self._value = self._read()
                except ConfigError as problem:
                    self._value = None
                    text, about = "nobody is let in over HTTP: %s; %s", {"event": "http"}
                    _log.warning(text, problem, problem.hint, extra=about)
            return self._value

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_mark_of(file) for file in self._files]


def _mark_of(path: Path) -> tuple[int, int, int] | None:
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_ino, about.st_size


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may lead anywhere


def _tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    read_checked(key, private=True, missing="`http.tls` in node.yaml names it")
    read_checked(certificate, private=False, missing="`http.tls` in node.yaml names it")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # A key with a passphrase would ask for it on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"http.tls: {certificate} and {key} cannot be used: {problem}",
            hint="both are PEM files, the key is that of the certificate and has no passphrase",
        ) from None
    return context


def _read_token(path: Path) -> bytes:
    token = read_checked(path, private=True, missing=_MAKE_TOKEN).strip()
    if not TOKEN_LENGTH_MIN <= len(token) <= TOKEN_LENGTH_MAX:
        raise ConfigError(
            f"http.token_file: the token in {path} has {len(token)} characters, not"
            f" {TOKEN_LENGTH_MIN} to {TOKEN_LENGTH_MAX}",
            hint=_MAKE_TOKEN,
        )
    if re.fullmatch(rb"[!-~]+", token) is None:
        raise ConfigError(
            f"http.token_file: {path} is more than one word of ASCII characters", hint=_MAKE_TOKEN
        )
    return token


def _token_in(authorization: str) -> bytes | None:
    """`Bearer TOKEN`; or `Basic`, where it is the password: so that browsers can ask for it."""
    scheme, _, credentials = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip().encode("utf-8", "replace")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return None
    return None
