"""Access control of the HTTP server: loopback only, unless TLS or a token is configured.

Reads the certificate, key and token files, again whenever they change.  Knows nothing of the
routes, except that health probes need no token.
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
from lightyear_node.identity.private_files import read_checked
from lightyear_node.storage.atomic_files import file_stamp
from lightyear_node.storage.file_descriptors import none_left

TOKEN_LENGTH_MIN = 32
"""32 hexadecimal digits are 128 bits, too many to guess."""
TOKEN_LENGTH_MAX = 1024
PUBLIC_PATHS = ("/livez", "/readyz")
"""Health probes; without the token they return a status, but no details."""

_LOCAL_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
_MAKE_TOKEN = "make one: (umask 077; openssl rand -hex 32 > FILE)"

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AccessFiles:
    """Files that grant access to other machines."""

    certificate: Path | None = None
    key: Path | None = None
    token: Path | None = None


class HttpAccess:
    def __init__(self, listen: str, files: AccessFiles) -> None:
        host, _, port = listen.rpartition(":")
        # Always IPv4, as documented; the system may resolve the name to ::1.
        self.host = "127.0.0.1" if host == "localhost" else host.strip("[]")
        self.port = int(port)
        self.local = _is_loopback(self.host)
        self._tls: _WatchedFiles[ssl.SSLContext] | None = None
        self._token: _WatchedFiles[bytes] | None = None
        certificate, key, token = files.certificate, files.key, files.token
        if not self.local and certificate is None and token is None:
            raise ConfigError(
                f"http.listen is {listen}, which other machines can reach",
                hint="set `http.token_file` or `http.tls` in node.yaml, or listen on 127.0.0.1",
            )
        if certificate is not None and key is not None:
            self._tls = _WatchedFiles((certificate, key), lambda: _tls_context(certificate, key))
        if token is not None:
            self._token = _WatchedFiles((token,), lambda: _read_token(token))

    @property
    def scheme(self) -> str:
        return "https" if self._tls is not None else "http"

    @property
    def warning(self) -> str | None:
        """A risk of the configured access that an operator should know."""
        if self.local:
            return None
        if self._tls is None:
            return (
                "http.listen: the token is sent unencrypted and can be read from this network's"
                " packets: set `http.tls`, unless you trust that network"
            )
        if self._token is None:
            return (
                "http.listen: without `http.token_file` every machine in this network can read the"
                " metrics and the dashboard"
            )
        return None

    def wrap(self, connection: socket.socket) -> socket.socket:
        """Wrap a new connection in TLS, if configured; raises OSError without a certificate."""
        if self._tls is None:
            return connection
        context = self._tls.value()
        if context is None:
            raise ConnectionAbortedError("there is no usable certificate at the moment")
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def allows_host(self, hosts: Sequence[str], version: str) -> bool:
        """Whether the `Host` headers are valid; on loopback they must name this machine.

        This prevents DNS rebinding: a browser on this machine could otherwise be directed here
        under the name of a foreign website, which could then read the response.  Requests from
        other machines are protected by the token or the certificate.
        """
        if not hosts:
            return version == "HTTP/1.0"
        if len(hosts) > 1:
            return False
        return not self.local or _LOCAL_HOST.fullmatch(hosts[0].strip()) is not None

    def allows_token(self, authorization: Sequence[str]) -> bool:
        """Whether a request carries the token, if one is configured."""
        if self._token is None:
            return True
        token = self._token.value()
        sent = _token_in(authorization[0]) if len(authorization) == 1 else None
        return token is not None and sent is not None and hmac.compare_digest(sent, token)


class _WatchedFiles(Generic[T]):
    """A value read from files, and read again when they change.

    There is no value while the files are invalid: the operator no longer wants the old one.
    """

    def __init__(self, files: Sequence[Path], read: Callable[[], T]) -> None:
        self._files = files
        self._read = read
        self._lock = threading.Lock()
        self._stamps = [file_stamp(file) for file in files]
        self._value: T | None = read()

    def value(self) -> T | None:
        with self._lock:
            stamps = [file_stamp(file) for file in self._files]
            if stamps != self._stamps:
                try:
                    self._value = self._read()
                except ConfigError as problem:
                    self._value = None
                    if none_left():
                        return None  # no free file descriptors: try again next time
                    text = "HTTP access is denied until this is fixed: %s; %s"
                    _log.warning(text, problem, problem.hint, extra={"event": "http"})
                self._stamps = stamps
            return self._value


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may resolve to any address


def _tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    read_checked(key, private=True, missing="`http.tls` in node.yaml names it")
    read_checked(certificate, private=False, missing="`http.tls` in node.yaml names it")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Without `password`, an encrypted key would prompt on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"http.tls: {certificate} and {key} cannot be used: {problem}",
            hint="both must be PEM files, and the key must match and have no passphrase",
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
            f"http.token_file: {path} must contain one word of ASCII characters", hint=_MAKE_TOKEN
        )
    return token


def _token_in(authorization: str) -> bytes | None:
    """Return the token of a `Bearer` header, or the password of a `Basic` one (for browsers)."""
    scheme, _, credentials = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip().encode("utf-8", "replace")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return None
    return None
