"""Sites for the tests of transport, in one process: real TLS over loopback."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import struct
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np

from lightyear_node.errors import DamagedFile
from lightyear_node.identity.keys import BACKDATED, LIFETIME, Identity, make_identity
from lightyear_node.storage.blobs import hash_file, tree_digest
from lightyear_node.transport.channel import DirectChannel
from lightyear_node.transport.client import PeerClient
from lightyear_node.transport.codec import ChunkGrid
from lightyear_node.transport.handlers import Handlers
from lightyear_node.transport.server import ExchangeServer, Pins
from lightyear_node.transport.upload_cache import Upload, UploadBase
from lightyear_node.types import (
    CHUNK_BYTES,
    Announcement,
    Digest,
    Generation,
    Hello,
    Manifest,
    PeerName,
    Reason,
    Round,
    Transfer,
    Update,
)
from lightyear_node.v1 import exchange_pb2_grpc

NOW = datetime.now(UTC)
A, B, C = (make_identity(name, NOW) for name in ("site-a", "site-b", "site-c"))
A_RENEWED, B_RENEWED = make_identity("site-a", NOW), make_identity("site-b", NOW)
B_EXPIRED = make_identity("site-b", NOW - LIFETIME - BACKDATED)
STRANGER = make_identity("site-b", NOW)

ELEMENTS = (5 * CHUNK_BYTES + 1236) // 4


def header_of(name: str, elements: int, dtype: str = "F32", width: int = 4) -> bytes:
    """The header of a weights file with one tensor."""
    entry = {"dtype": dtype, "shape": [elements], "data_offsets": [0, width * elements]}
    text = json.dumps({name: entry}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def near(content: bytes, header: bytes) -> bytes:
    """Weights of a previous round: every element differs slightly."""
    values = np.frombuffer(content, np.uint32, offset=len(header))
    return header + (values + np.arange(len(values), dtype=np.uint32) % 1000).tobytes()


def flip(path: Path, at: int) -> None:
    """Flip one bit, as a bad disk does."""
    with path.open("r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def frame_of(*planes: tuple[int, bytes], kind: int = 0) -> bytes:
    """A chunk's frame: its kind, then method and bytes of each plane."""
    return bytes([kind]) + b"".join(
        struct.pack("<BI", method, len(packed)) + packed for method, packed in planes
    )


HEADER = header_of("w", ELEMENTS)
GRID = ChunkGrid(HEADER)
CONTENT = HEADER + os.urandom(4 * ELEMENTS)
CHUNKS = [CONTENT[i : i + CHUNK_BYTES] for i in range(0, len(CONTENT), CHUNK_BYTES)]
HASHES = tuple(hashlib.sha256(chunk).digest() for chunk in CHUNKS)
DIGEST = tree_digest(len(CONTENT), HASHES)

MANIFEST = Manifest(
    federation="chest-xray",
    update=Update(PeerName("site-a"), Generation(0), Round(7), DIGEST),
    lamport=99,
    schema=Digest("cd" * 32),
    raw_bytes=len(CONTENT),
    samples=500,
)
HELLO = Hello(
    version_min=1,
    version_max=3,
    federation="chest-xray",
    agreement=Digest("01" * 32),
    schema=Digest("cd" * 32),
    initial_model=Digest("02" * 32),
    round=Round(7),
    boot_id="3f2b-11",
    wall_time_ns=1_700_000_000_000_000_000,
    lamport=12,
)
QUIET = Announcement(lamport=3, round=Round(1), phase="train", latest=None)
ANNOUNCED = replace(QUIET, latest=A.sign_manifest(MANIFEST))


class FakeHost:
    """Answers every call with `answer`, and records the calls."""

    def __init__(self, offers: dict[Digest, Upload] | None = None) -> None:
        self.offers = offers or {}
        self.calls: list[tuple[PeerName, Any]] = []
        self.transfers: list[tuple[PeerName, Transfer]] = []
        self.denials: list[tuple[str, PeerName | None]] = []
        self.failed_uploads: list[tuple[PeerName, Reason]] = []
        self.damages: list[str] = []
        self.changed = asyncio.Event()
        self.gates: dict[str, asyncio.Event] = {}
        self.answer: Callable[[PeerName, Any], Any] = lambda peer, sent: sent

    async def hello(self, peer: PeerName, hello: Hello) -> Hello:
        self.calls.append((peer, hello))
        reply: Hello = self.answer(peer, hello)
        return reply

    async def announce(self, peer: PeerName, announcement: Announcement) -> Announcement:
        self.calls.append((peer, announcement))
        reply: Announcement = self.answer(peer, announcement)
        return reply

    async def offer(self, peer: PeerName, digest: Digest) -> Upload | None:
        self.calls.append((peer, digest))
        self.changed.set()
        if "offer" in self.gates:
            await self.gates["offer"].wait()
        return self.offers.get(digest)

    def upload_finished(self, peer: PeerName, transfer: Transfer) -> None:
        self.transfers.append((peer, transfer))
        self.changed.set()

    def upload_failed(self, peer: PeerName, reason: Reason) -> None:
        self.failed_uploads.append((peer, reason))
        self.changed.set()

    def strangers_closed(self, count: int) -> None:
        pass

    def denied(self, reason: str, peer: PeerName | None) -> None:
        self.denials.append((reason, peer))
        self.changed.set()

    def damaged(self, problem: DamagedFile) -> None:
        self.damages.append(str(problem))
        self.changed.set()

    async def until(self, condition: Callable[[], bool], timeout: float = 20) -> None:
        """Wait until a call makes the condition true."""
        async with asyncio.timeout(timeout):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


def offering(path: Path, base: Path | None = None) -> dict[Digest, Upload]:
    """Write the update to `path`, and offer it."""
    path.write_bytes(CONTENT)
    known = UploadBase(base, hash_file(base)[2]) if base is not None else None
    return {DIGEST: Upload(DIGEST, path, HASHES, GRID, known)}


def pins(*identities: Identity) -> Pins:
    pinned: dict[PeerName, list[Any]] = {}
    for identity in identities:
        pinned.setdefault(identity.name, []).append(identity.certificate)
    return pinned


@asynccontextmanager
async def serving(
    host: FakeHost, identity: Identity = A, peers: Iterable[Identity] = (B, C)
) -> AsyncIterator[tuple[ExchangeServer, str]]:
    with tempfile.TemporaryDirectory() as scratch:
        handlers = Handlers(host, Path(scratch))
        server = ExchangeServer(identity, pins(*peers), handlers, host)
        port = await server.start("127.0.0.1:0")
        try:
            yield server, f"127.0.0.1:{port}"
        finally:
            await server.stop()
            handlers.close()


@asynccontextmanager
async def calling(
    address: str, identity: Identity = B, pinned: Iterable[Identity] = (A,)
) -> AsyncIterator[PeerClient]:
    """A client for the site at `address`, with the certificates of `pinned` as its pins."""
    first, *rest = pinned
    certificates = [one.certificate for one in (first, *rest)]
    client = PeerClient(first.name, DirectChannel(first.name, address, certificates, identity))
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def raw_stub(address: str, identity: Identity | None = B) -> AsyncIterator[Any]:
    """A generated stub, without the checks of `PeerClient`."""
    key = identity.tls_key_pem if identity else None
    chain = identity.certificate.pem if identity else None
    credentials = grpc.ssl_channel_credentials(A.certificate.pem, key, chain)
    options = (
        ("grpc.ssl_target_name_override", "site-a"),
        ("grpc.enable_http_proxy", 0),
        # Unread data stays with the sender.
        ("grpc.http2.bdp_probe", 0),
    )
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        yield exchange_pb2_grpc.ExchangeStub(channel)


class Hostile(exchange_pb2_grpc.ExchangeServicer):  # type: ignore[misc]
    """A peer with a valid certificate that sends arbitrary data."""

    def __init__(self, fetch: Callable[[Any, Any], Awaitable[None]]) -> None:
        self._fetch = fetch

    async def Hello(self, request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "\x1b[31mno\nsuch: reason")

    async def Announce(self, request: Any, context: Any) -> Any:
        return request

    async def Fetch(self, request: Any, context: Any) -> None:
        await self._fetch(request, context)


@asynccontextmanager
async def hostile(fetch: Callable[[Any, Any], Awaitable[None]]) -> AsyncIterator[str]:
    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    exchange_pb2_grpc.add_ExchangeServicer_to_server(Hostile(fetch), server)
    credentials = grpc.ssl_server_credentials(
        [(A.tls_key_pem, A.certificate.pem)], B.certificate.pem, require_client_auth=True
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def status_of(call: Any) -> grpc.StatusCode:
    """Read a call to its end; returns its status."""
    try:
        async with asyncio.timeout(20):
            while await call.read() is not grpc.aio.EOF:
                pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK
