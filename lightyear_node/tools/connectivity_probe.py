"""Tests the connection to a peer step by step: DNS, TCP, TLS, and both certificates.

For most failures gRPC reports only that it could not connect.  The probe uses plain sockets and
accepts any certificate, so that a wrong one can be described.  It must not decide which site to
trust: its results are used for messages only.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from cryptography import x509

from lightyear_node.errors import ConfigError
from lightyear_node.identity.keys import Certificate, fingerprint
from lightyear_node.transport.grpc_errors import printable_line
from lightyear_node.types import Check, Mark, PeerName

DNS, TCP, TLS, PIN, ACCEPTED = "dns", "tcp", "tls", "pin", "accepted"

_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
_NOT_TLS = (
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "HTTPS_PROXY_REQUEST",
    "RECORD_LAYER_FAILURE",
    "PACKET_LENGTH_TOO_LONG",
    "UNEXPECTED_MESSAGE",
)
_OLD_TLS = ("UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION")

Endpoint = tuple[socket.AddressFamily, Any]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class StepFailed(Exception):
    """The first step that fails, with advice for the operator."""

    def __init__(self, step: str, about: str, advice: str) -> None:
        super().__init__(about)
        self.check = Check(step, Mark.BROKEN, about, advice)


class _NoTls13(StepFailed):
    """The server refuses TLS 1.3, which every node supports: it may be a proxy."""


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """A peer's address and pinned certificates, and our keys."""

    peer: PeerName
    address: str
    pinned: Sequence[Certificate]
    keys_dir: Path
    """Python's TLS reads keys only from files."""

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


async def resolve(target: ProbeTarget, timeout_s: float) -> list[Endpoint]:
    """The IP addresses of the target; raises `StepFailed`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _resolved(target.host, target.port)
    except TimeoutError:
        raise StepFailed(
            DNS,
            f"the name servers did not answer for {target.host} within {timeout_s:g} s",
            "check this machine's name servers (/etc/resolv.conf), and whether the VPN is up",
        ) from None
    except (OSError, UnicodeError) as problem:
        cause = problem.strerror if isinstance(problem, OSError) else "it is no valid host name"
        raise StepFailed(
            DNS,
            f"the name {target.host} does not resolve: {cause}",
            "check its spelling in peers.yaml, and whether it is known inside our network",
        ) from None


async def probe(
    target: ProbeTarget, endpoints: Sequence[Endpoint], now: datetime, timeout_s: float
) -> AsyncIterator[Check]:
    """Check TCP, TLS, the peer's certificate and ours, up to the first step that fails."""
    try:
        connection = await _connect(target, endpoints, timeout_s)
        yield Check(TCP, Mark.HOLDS, f"connected to {connection.getpeername()[0]}")
        try:
            reader, writer = await _handshake(target, connection, timeout_s)
        except _NoTls13 as failed:
            impostor = await _impostor_with_old_tls(target, endpoints, timeout_s)
            if impostor is None:
                raise
            yield Check(TLS, Mark.DIFFERS, str(failed))
            raise impostor from None
        try:
            tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
            yield Check(TLS, Mark.HOLDS, str(tls.version()))
            yield compare(target, tls.getpeercert(binary_form=True) or b"", now)
            yield await _check_accepted(target, reader, timeout_s)
        finally:
            writer.close()
    except StepFailed as failed:
        yield failed.check


async def _resolved(host: str, port: int) -> list[Endpoint]:
    """Resolve in a daemon thread: a thread of the event loop's pool would delay the exit."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[Endpoint]] = loop.create_future()

    def set_answer(found: list[Endpoint] | Exception) -> None:
        if answer.done():
            return
        if isinstance(found, Exception):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    def look_up() -> None:
        found: list[Endpoint] | Exception
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found = [(info[0], info[4]) for info in infos]
        except (OSError, UnicodeError) as problem:
            found = problem
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(set_answer, found)

    threading.Thread(target=look_up, daemon=True).start()
    return await answer


async def _connect(
    target: ProbeTarget, endpoints: Sequence[Endpoint], timeout_s: float
) -> socket.socket:
    """Connect to the first address that answers; raises the failure of the last one."""
    problem: OSError = OSError(errno.EADDRNOTAVAIL, "it has no address")
    for family, endpoint in endpoints:
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_connect(connection, endpoint)
            return connection
        except OSError as failed:  # a timeout is one, too
            connection.close()
            problem = failed
        except BaseException:
            connection.close()
            raise
    raise _connect_failure(target, problem, timeout_s)


def _connect_failure(target: ProbeTarget, problem: OSError, timeout_s: float) -> StepFailed:
    if isinstance(problem, ConnectionRefusedError):
        return StepFailed(
            TCP,
            f"nothing listens at {target.address}: the connection was refused",
            f"ask {target.peer} whether its node is running, and on this port",
        )
    if isinstance(problem, TimeoutError):
        return StepFailed(
            TCP,
            f"no answer from {target.address} within {timeout_s:g} s:"
            " a firewall drops the packets, or the machine is off",
            f"ask network operations at both sites to allow TCP to {target.address},"
            " and check that the VPN is up",
        )
    if problem.errno in _NO_ROUTE:
        return StepFailed(
            TCP,
            f"there is no route to {target.address}: {problem.strerror}",
            "check this machine's network, and whether the VPN is up",
        )
    return StepFailed(
        TCP,
        f"cannot connect to {target.address}: {problem.strerror or problem}",
        "check this machine's network, and the address in peers.yaml",
    )


async def _handshake(target: ProbeTarget, connection: socket.socket, timeout_s: float) -> Streams:
    context = _context()
    context.load_cert_chain(target.keys_dir / "tls.crt", target.keys_dir / "tls.key")
    try:
        return await _tls(target, context, connection, timeout_s)
    except ssl.SSLError as problem:
        if problem.reason in _OLD_TLS:
            raise _NoTls13(
                TLS,
                f"{target.address} does not speak TLS 1.3, which every node does",
                f"a proxy may stand in between: ask network operations to exempt {target.address}",
            ) from None
        if problem.reason in _NOT_TLS:
            raise StepFailed(
                TLS,
                f"something at {target.address} answers, but does not speak TLS",
                "another program has that port, or a proxy answers in plain text:"
                f" check the address with {target.peer}",
            ) from None
        reason = printable_line(str(problem.reason))
        raise StepFailed(
            TLS,
            f"the TLS handshake with {target.address} failed ({reason})",
            f"check with {target.peer} what listens there; a firewall may interfere",
        ) from None
    except TimeoutError:
        raise StepFailed(
            TLS,
            f"{target.address} accepts the connection, but sends nothing for {timeout_s:g} s",
            f"ask {target.peer} whether its node hangs, or another program has that port",
        ) from None
    except OSError:
        raise _NoTls13(
            TLS,
            f"{target.address} closes the connection during the TLS handshake",
            f"check with {target.peer} what listens there; a firewall may cut TLS connections:"
            f" ask network operations to exempt {target.address}",
        ) from None


async def _impostor_with_old_tls(
    target: ProbeTarget, endpoints: Sequence[Endpoint], timeout_s: float
) -> StepFailed | None:
    """Identify a server that speaks only an older TLS; None if it is the peer itself, or unknown.

    It does not get our certificate, which an older TLS would send in the clear.
    """
    try:
        connection = await _connect(target, endpoints, timeout_s)
        _, writer = await _tls(target, _context(ssl.TLSVersion.TLSv1_2), connection, timeout_s)
    except (StepFailed, OSError):
        return None
    tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
    der = tls.getpeercert(binary_form=True) or b""
    writer.close()
    return None if _is_pinned(target, der) else _wrong_certificate(target, der)


def _context(oldest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The certificate is only described, not trusted.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = oldest
    context.set_alpn_protocols(["h2"])
    return context


async def _tls(
    target: ProbeTarget, context: ssl.SSLContext, connection: socket.socket, timeout_s: float
) -> Streams:
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.open_connection(
                sock=connection, ssl=context, server_hostname=target.peer
            )
    except BaseException:
        connection.close()
        raise


def compare(target: ProbeTarget, der: bytes, now: datetime) -> Check:
    """Compare the server's certificate with those in peers.yaml; raises `StepFailed`."""
    if not _is_pinned(target, der):
        raise _wrong_certificate(target, der)
    parsed = x509.load_der_x509_certificate(der)
    valid_from, expires = parsed.not_valid_before_utc, parsed.not_valid_after_utc
    if now >= expires:
        raise StepFailed(
            PIN,
            f"the certificate of {target.peer} expired on {expires:%Y-%m-%d}",
            f"ask {target.peer} to renew it and to send its new join line;"
            f" if today is not {now:%Y-%m-%d}, set our clock (NTP)",
        )
    if now < valid_from:
        raise StepFailed(
            PIN,
            f"the certificate of {target.peer} is valid from {valid_from:%Y-%m-%d},"
            f" and our clock says {now:%Y-%m-%d}",
            "set our clock (NTP); if it is right, theirs was ahead when they made their keys",
        )
    return Check(PIN, Mark.HOLDS, fingerprint(der))


def _is_pinned(target: ProbeTarget, der: bytes) -> bool:
    return fingerprint(der) in {certificate.fingerprint for certificate in target.pinned}


def _wrong_certificate(target: ProbeTarget, der: bytes) -> StepFailed:
    shown = fingerprint(der)
    try:
        certificate = Certificate.parse(der)
    except ConfigError:
        return StepFailed(
            PIN,
            f"a foreign certificate, issued by {_issuer(der)}, is shown at {target.address}:"
            " a TLS-inspecting proxy stands in between",
            f"ask network operations to exempt {target.address} from TLS inspection",
        )
    if certificate.name != target.peer:
        return StepFailed(
            PIN,
            f"{target.address} is the node of {certificate.name}, not of {target.peer}",
            f"correct the address of {target.peer} in peers.yaml",
        )
    return StepFailed(
        PIN,
        f"{target.peer} shows another certificate than the one in peers.yaml, {shown}:"
        " it has renewed its keys",
        f"ask {target.peer} for its new join line, compare the fingerprint by telephone,"
        " and `lightyear-node peers add` it",
    )


def _issuer(der: bytes) -> str:
    try:
        return (
            printable_line(x509.load_der_x509_certificate(der).issuer.rfc4514_string())
            or "an empty name"
        )
    except Exception:  # any exception of the library: these bytes are untrusted
        return "an unreadable name"


async def _check_accepted(
    target: ProbeTarget, reader: asyncio.StreamReader, timeout_s: float
) -> Check:
    """A node sends data once it has accepted our certificate, and disconnects otherwise."""
    received = b""
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(timeout_s):
            received = await reader.read(1)
    if received:
        return Check(ACCEPTED, Mark.HOLDS, f"{target.peer} accepts our certificate")
    raise StepFailed(
        ACCEPTED,
        f"{target.peer} closes the connection when it sees our certificate:"
        " ours is missing in its peers.yaml, or an old one is there",
        f"send {target.peer} the line of `lightyear-node id`, for its `peers add`;"
        " if ours is there, its clock is wrong",
    )
