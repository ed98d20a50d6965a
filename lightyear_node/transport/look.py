"""Looks at a peer's address with open eyes: the name, the port, the certificate that comes back.

gRPC says of most failures only that it could not connect.  Here the same way is gone step by step,
with plain sockets and without refusing anybody, so that also a wrong certificate can be looked at.
Must not decide whom to trust: nothing that is read here is used for anything but a sentence.
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
from lightyear_node.identity import Certificate, fingerprint
from lightyear_node.records import Check, Mark, PeerName
from lightyear_node.transport import limits

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


class Broken(Exception):
    """The first link that does not hold, and what to do."""

    def __init__(self, link: str, about: str, advice: str) -> None:
        super().__init__(about)
        self.check = Check(link, Mark.BROKEN, about, advice)


class _NoTls13(Broken):
    """Whoever is there wants no TLS 1.3; nodes do, so it may be somebody in between."""


@dataclass(frozen=True, slots=True)
class Door:
    """Which peer is to be found where, by which certificates, and as whom we knock."""

    peer: PeerName
    address: str
    pinned: Sequence[Certificate]
    keys_dir: Path
    """Python's TLS reads a key only from a file."""

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


async def resolve(door: Door, timeout_s: float) -> list[Endpoint]:
    """Where the address leads; raises `Broken`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _resolved(door.host, door.port)
    except TimeoutError:
        raise Broken(
            DNS,
            f"the name servers did not answer for {door.host} within {timeout_s:g} s",
            "check this machine's name servers (/etc/resolv.conf), and whether the VPN is up",
        ) from None
    except (OSError, UnicodeError) as problem:
        words = problem.strerror if isinstance(problem, OSError) else "it cannot be a host's name"
        raise Broken(
            DNS,
            f"the name {door.host} does not resolve: {words}",
            "check its spelling in peers.yaml, and whether it is known inside our network",
        ) from None


async def follow(
    door: Door, endpoints: Sequence[Endpoint], now: datetime, timeout_s: float
) -> AsyncIterator[Check]:
    """TCP, TLS, the pin, and whether they take our certificate, up to the first that is broken."""
    try:
        connection = await _connect(door, endpoints, timeout_s)
        yield Check(TCP, Mark.HOLDS, f"connected to {connection.getpeername()[0]}")
        try:
            reader, writer = await _shake_hands(door, connection, timeout_s)
        except _NoTls13 as broken:
            stranger = await _unmask(door, endpoints, timeout_s)
            if stranger is None:
                raise
            yield Check(TLS, Mark.DIFFERS, str(broken))
            raise stranger from None
        try:
            tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
            yield Check(TLS, Mark.HOLDS, str(tls.version()))
            yield compare(door, tls.getpeercert(binary_form=True) or b"", now)
            yield await _are_we_let_in(door, reader, timeout_s)
        finally:
            writer.close()
    except Broken as broken:
        yield broken.check


async def _resolved(host: str, port: int) -> list[Endpoint]:
    """In a thread that nobody waits for: one of the loop's own would hold up the program's end."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[Endpoint]] = loop.create_future()

    def settle(found: list[Endpoint] | Exception) -> None:
        if answer.done():
            return
        if isinstance(found, Exception):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    def ask() -> None:
        found: list[Endpoint] | Exception
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found = [(info[0], info[4]) for info in infos]
        except (OSError, UnicodeError) as problem:
            found = problem
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, found)

    threading.Thread(target=ask, daemon=True).start()
    return await answer


async def _connect(door: Door, endpoints: Sequence[Endpoint], timeout_s: float) -> socket.socket:
    """The first of the name's addresses that answers; otherwise what was wrong with the last."""
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
    raise _unconnected(door, problem, timeout_s)


def _unconnected(door: Door, problem: OSError, timeout_s: float) -> Broken:
    if isinstance(problem, ConnectionRefusedError):
        return Broken(
            TCP,
            f"nothing listens at {door.address}: the connection was refused",
            f"ask {door.peer} whether its node is running, and on this port",
        )
    if isinstance(problem, TimeoutError):
        return Broken(
            TCP,
            f"no answer from {door.address} within {timeout_s:g} s:"
            " a firewall drops the packets, or the machine is off",
            f"ask network operations at both sites to allow TCP to {door.address},"
            " and check that the VPN is up",
        )
    if problem.errno in _NO_ROUTE:
        return Broken(
            TCP,
            f"there is no way to {door.address}: {problem.strerror}",
            "check this machine's network, and whether the VPN is up",
        )
    return Broken(
        TCP,
        f"cannot connect to {door.address}: {problem.strerror or problem}",
        "check this machine's network, and the address in peers.yaml",
    )


async def _shake_hands(door: Door, connection: socket.socket, timeout_s: float) -> Streams:
    context = _context()
    context.load_cert_chain(door.keys_dir / "tls.crt", door.keys_dir / "tls.key")
    try:
        return await _tls(door, context, connection, timeout_s)
    except ssl.SSLError as problem:
        if problem.reason in _OLD_TLS:
            raise _NoTls13(
                TLS,
                f"{door.address} does not speak TLS 1.3, which every node does",
                f"something stands in between: ask network operations to exempt {door.address}",
            ) from None
        if problem.reason in _NOT_TLS:
            raise Broken(
                TLS,
                f"something at {door.address} answers, but does not speak TLS",
                "another program has that port, or a proxy answers in plain text:"
                f" check the address with {door.peer}",
            ) from None
        raise Broken(
            TLS,
            f"the TLS handshake with {door.address} failed ({_printable(str(problem.reason))})",
            f"check with {door.peer} what listens there; a firewall may tamper with the line",
        ) from None
    except TimeoutError:
        raise Broken(
            TLS,
            f"{door.address} takes the connection, but says nothing for {timeout_s:g} s",
            f"ask {door.peer} whether its node hangs, or another program has that port",
        ) from None
    except OSError:
        raise _NoTls13(
            TLS,
            f"{door.address} hangs up in the middle of the TLS handshake",
            f"check with {door.peer} what listens there; a firewall may cut TLS connections:"
            f" ask network operations to exempt {door.address}",
        ) from None


async def _unmask(door: Door, endpoints: Sequence[Endpoint], timeout_s: float) -> Broken | None:
    """Who it is that speaks an older TLS, by his certificate; None if it is nobody else.

    He does not get to see ours, which an older TLS would send in the clear.
    """
    try:
        connection = await _connect(door, endpoints, timeout_s)
        _, writer = await _tls(door, _context(ssl.TLSVersion.TLSv1_2), connection, timeout_s)
    except (Broken, OSError):
        return None
    tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
    der = tls.getpeercert(binary_form=True) or b""
    writer.close()
    return None if _is_pinned(door, der) else _stranger(door, der)


def _context(oldest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Whatever comes back is only looked at.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = oldest
    context.set_alpn_protocols(["h2"])
    return context


async def _tls(
    door: Door, context: ssl.SSLContext, connection: socket.socket, timeout_s: float
) -> Streams:
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.open_connection(
                sock=connection, ssl=context, server_hostname=door.peer
            )
    except BaseException:
        connection.close()
        raise


def compare(door: Door, der: bytes, now: datetime) -> Check:
    """The certificate that came back with those in peers.yaml; raises `Broken`."""
    if not _is_pinned(door, der):
        raise _stranger(door, der)
    parsed = x509.load_der_x509_certificate(der)
    begins, ends = parsed.not_valid_before_utc, parsed.not_valid_after_utc
    if now >= ends:
        raise Broken(
            PIN,
            f"the certificate of {door.peer} ended on {ends:%Y-%m-%d}",
            f"ask {door.peer} to renew it and to send its new join line;"
            f" if today is not {now:%Y-%m-%d}, set our clock (NTP)",
        )
    if now < begins:
        raise Broken(
            PIN,
            f"the certificate of {door.peer} is valid from {begins:%Y-%m-%d} on,"
            f" and by our clock it is {now:%Y-%m-%d}",
            "set our clock (NTP); if it is right, theirs was ahead when they made their keys",
        )
    return Check(PIN, Mark.HOLDS, fingerprint(der))


def _is_pinned(door: Door, der: bytes) -> bool:
    return fingerprint(der) in {certificate.fingerprint for certificate in door.pinned}


def _stranger(door: Door, der: bytes) -> Broken:
    shown = fingerprint(der)
    try:
        certificate = Certificate.parse(der)
    except ConfigError:
        return Broken(
            PIN,
            f"a foreign certificate, issued by {_issuer(der)}, is shown at {door.address}:"
            " a TLS-inspecting proxy stands in between",
            f"ask network operations to exempt {door.address} from TLS inspection",
        )
    if certificate.name != door.peer:
        return Broken(
            PIN,
            f"{door.address} is the node of {certificate.name}, not of {door.peer}",
            f"correct the address of {door.peer} in peers.yaml",
        )
    return Broken(
        PIN,
        f"{door.peer} shows another certificate than the one in peers.yaml, {shown}:"
        " it has renewed its keys",
        f"ask {door.peer} for its new join line, compare the fingerprint by telephone,"
        " and `lightyear-node peers add` it",
    )


def _issuer(der: bytes) -> str:
    try:
        return _printable(x509.load_der_x509_certificate(der).issuer.rfc4514_string()) or "nobody"
    except Exception:  # whatever the library raises, these bytes came from outside
        return "somebody whose name cannot be read"


async def _are_we_let_in(door: Door, reader: asyncio.StreamReader, timeout_s: float) -> Check:
    """A node speaks first once it has taken our certificate, and hangs up when it has not."""
    said = b""
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(timeout_s):
            said = await reader.read(1)
    if said:
        return Check(ACCEPTED, Mark.HOLDS, f"{door.peer} takes our certificate")
    raise Broken(
        ACCEPTED,
        f"{door.peer} hangs up when it sees our certificate:"
        " ours is missing in its peers.yaml, or an old one is there",
        f"send {door.peer} the line of `lightyear-node id`, to add it and restart;"
        " if ours is there, its clock is wrong",
    )


def _printable(said: str) -> str:
    line = "".join(char if char.isprintable() else "?" for char in said)
    return line[: limits.DETAIL_CHARS_MAX]
