"""Servers that may be found at a peer's address instead of its node, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lightyear_node.errors import DamagedFile
from lightyear_node.identity.keys import Identity
from lightyear_node.transport.handlers import Handlers
from lightyear_node.transport.server import ExchangeServer
from lightyear_node.transport.upload_cache import Upload
from lightyear_node.types import Announcement, Digest, Hello, PeerName, Reason, Transfer

AUTHORITY = "Hospital Web Gateway"


class Echo:
    """A minimal node: answers a greeting with the same greeting."""

    async def hello(self, peer: PeerName, hello: Hello) -> Hello:
        return hello

    async def announce(self, peer: PeerName, announcement: Announcement) -> Announcement:
        return announcement

    async def offer(self, peer: PeerName, digest: Digest) -> Upload | None:
        return None

    def upload_finished(self, peer: PeerName, transfer: Transfer) -> None:
        pass

    def upload_failed(self, peer: PeerName, reason: Reason) -> None:
        pass

    def strangers_closed(self, count: int) -> None:
        pass

    def denied(self, reason: str, peer: PeerName | None) -> None:
        pass

    def damaged(self, problem: DamagedFile) -> None:
        raise problem


@contextlib.asynccontextmanager
async def node(address: str, identity: Identity, accepts: Identity) -> AsyncIterator[None]:
    """A node's server that accepts one other site."""
    host = Echo()
    with tempfile.TemporaryDirectory() as scratch:
        handlers = Handlers(host, Path(scratch))
        server = ExchangeServer(identity, {accepts.name: (accepts.certificate,)}, handlers, host)
        await server.start(address)
        try:
            yield
        finally:
            await server.stop()
            handlers.close()


@contextlib.asynccontextmanager
async def plain(address: str, banner: bytes, answer: bytes) -> AsyncIterator[None]:
    """A server without TLS: sends its banner at once, and `answer` to any data."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(banner)
            while await reader.read(1 << 16):
                writer.write(answer)
                await writer.drain()
        writer.close()

    host, _, port = address.rpartition(":")
    async with await asyncio.start_server(serve, host, int(port)):
        yield


@contextlib.asynccontextmanager
async def cutting(address: str) -> AsyncIterator[None]:
    """Accepts every connection and resets it at once, as some firewalls do."""

    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    host, _, port = address.rpartition(":")
    async with await asyncio.start_server(reset, host, int(port)):
        yield


@contextlib.contextmanager
def dropping(address: str) -> Iterator[None]:
    """Packets to this port get no answer, as behind a firewall: its backlog stays full."""
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        listener.listen(0)
        for _ in range(8):
            filler = held.enter_context(socket.socket())
            filler.settimeout(1.0)
            try:
                filler.connect((host, int(port)))
            except TimeoutError:
                break
        else:
            raise AssertionError("the backlog never fills")
        yield


@contextlib.asynccontextmanager
async def inspecting_proxy(
    address: str, real_address: str, folder: Path, newest: ssl.TLSVersion
) -> AsyncIterator[None]:
    """Terminates TLS with a certificate of its own authority, and forwards all data."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = newest
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(_resigned(folder, "site-b"))
    upstream_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    upstream_context.check_hostname = False
    upstream_context.verify_mode = ssl.CERT_NONE
    upstream_context.set_alpn_protocols(["h2"])

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = real_address.rpartition(":")
        upstream_reader, upstream_writer = await asyncio.open_connection(
            host, int(port), ssl=upstream_context
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(_pump(reader, upstream_writer))
            group.create_task(_pump(upstream_reader, writer))

    host, _, port = address.rpartition(":")
    async with await asyncio.start_server(relay, host, int(port), ssl=context):
        yield


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while content := await reader.read(1 << 16):
            writer.write(content)
            await writer.drain()
    writer.close()


def _resigned(folder: Path, name: str) -> Path:
    """A key and a certificate for `name`, signed by the proxy's own authority."""
    now = datetime.now(UTC)
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, AUTHORITY)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(authority)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    path = folder / "proxy.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
    return path
