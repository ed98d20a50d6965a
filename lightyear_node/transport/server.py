"""The side that is called: greets, hears announcements, serves updates.

Owns who may call, how much and how often.  Must not know what an answer means: that is the host's
(the node's) business.  Deny by default: TLS admits only pinned certificates, and every single call
is looked up again, because a withdrawn pin does not end a connection that is already open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio
from grpc import StatusCode

from lightyear_node.errors import ConfigError, PeerError
from lightyear_node.identity import Certificate, Identity, fingerprint
from lightyear_node.records import (
    CHUNK_BYTES,
    Announcement,
    Digest,
    Fingerprint,
    Hello,
    PeerName,
    Transfer,
)
from lightyear_node.store import chunk_length
from lightyear_node.transport import limits, messages
from lightyear_node.transport.codec import encode_chunk
from lightyear_node.transport.doorway import Doorway
from lightyear_node.transport.messages import Message
from lightyear_node.v1 import exchange_pb2_grpc

_log = logging.getLogger(__name__)

Pins = Mapping[PeerName, Sequence[Certificate]]
"""Who may call, by which certificates; two for a peer that is renewing its own."""
Context = Any
"""gRPC's context of one call; its type parameters would be generated messages."""


@dataclass(frozen=True, slots=True)
class Offer:
    """An update that a peer may have."""

    path: Path
    raw_bytes: int
    chunk_digests: tuple[bytes, ...]


class Host(Protocol):
    """What the node answers.  A `PeerError` raised here is told to the caller with its reason."""

    async def hello(self, peer: PeerName, hello: Hello) -> Hello: ...

    async def announce(self, peer: PeerName, announcement: Announcement) -> Announcement: ...

    async def offer(self, peer: PeerName, digest: Digest) -> Offer | None: ...

    def served(self, peer: PeerName, transfer: Transfer) -> None: ...

    def denied(self, reason: str, peer: PeerName | None) -> None: ...


class ExchangeServer:
    """Listens for the peers; to be made and used within one event loop."""

    def __init__(self, identity: Identity, pins: Pins, host: Host) -> None:
        self._identity = identity
        self._host = host
        self._doorway = Doorway(limits.HANDSHAKE_S)
        self._exchange = _Exchange(host, self._doorway)
        self._server: grpc.aio.Server | None = None
        self.pin(pins)

    def pin(self, pins: Pins) -> None:
        """Replace who may call, from the next handshake, the next call and the next chunk on."""
        certificates = [certificate for pinned in pins.values() for certificate in pinned]
        if not certificates:
            # gRPC takes no roots to mean every public authority.
            raise ConfigError("there is no peer whose certificate could be accepted")
        self._roots = b"".join(certificate.pem for certificate in certificates)
        self._exchange.pin(pins)

    async def start(self, listen: str) -> int:
        """Bind and answer; returns the port, for who asked for port 0."""
        server = grpc.aio.server(
            options=limits.SERVER_OPTIONS, maximum_concurrent_rpcs=limits.CALLS_MAX
        )
        exchange_pb2_grpc.add_ExchangeServicer_to_server(self._exchange, server)
        credentials = grpc.dynamic_ssl_server_credentials(
            self._tls(), self._knocked, require_client_authentication=True
        )
        try:
            port = server.add_secure_port(listen, credentials)
        except RuntimeError:
            raise ConfigError(
                f"cannot listen on {listen}: the port is in use, or the address is not ours",
                hint="is another node running here?",
            ) from None
        await server.start()
        self._server = server
        return port

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(limits.STOP_S)
        self._exchange.pool.shutdown(wait=False, cancel_futures=True)

    def report_strangers(self) -> None:
        """Tell the host of every connection that never became a peer's; to be called often."""
        for _ in range(self._doorway.turned_away(time.monotonic())):
            self._host.denied("handshake", None)

    def _knocked(self) -> grpc.ServerCertificateConfiguration:
        self._doorway.knock(time.monotonic())
        return self._tls()

    def _tls(self) -> grpc.ServerCertificateConfiguration:
        """Asked for at every handshake, so that new pins need no restart."""
        return grpc.ssl_server_certificate_configuration(
            [(self._identity.tls_key_pem, self._identity.certificate.pem)],
            root_certificates=self._roots,
        )


class _Exchange(exchange_pb2_grpc.ExchangeServicer):  # type: ignore[misc]
    """The service's methods, by the names that exchange.proto gives them."""

    def __init__(self, host: Host, doorway: Doorway) -> None:
        self._host = host
        self._doorway = doorway
        self._peers: dict[Fingerprint, PeerName] = {}
        self._buckets: dict[PeerName, limits.TokenBucket] = {}
        self._fetches: Counter[PeerName] = Counter()
        self._stalled = 0
        self.pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="serve")

    def pin(self, pins: Pins) -> None:
        self._peers = {
            certificate.fingerprint: peer for peer, pinned in pins.items() for certificate in pinned
        }
        for peer in pins:
            self._buckets.setdefault(
                peer, limits.TokenBucket(limits.ANNOUNCEMENTS_PER_S, limits.ANNOUNCEMENTS_BURST)
            )

    async def Hello(self, request: Message, context: Context) -> Message:
        async with self._call(context) as peer:
            hello = messages.hello_from(request)
            return messages.hello_to(await self._host.hello(peer, hello))

    async def Announce(self, request: Message, context: Context) -> Message:
        async with self._call(context) as peer:
            announcement = messages.announcement_from(request)
            if not self._buckets[peer].take(_now()):
                await self._deny(context, StatusCode.RESOURCE_EXHAUSTED, "too_often", peer)
            return messages.announcement_to(await self._host.announce(peer, announcement))

    async def Fetch(self, request: Message, context: Context) -> None:
        async with self._call(context) as peer:
            digest, first_chunk, _ = messages.fetch_from(request)
            if self._busy(peer):
                await self._deny(context, StatusCode.RESOURCE_EXHAUSTED, "too_many_fetches", peer)
            with self._counted(peer):
                offer = await self._host.offer(peer, digest)
                if offer is None:
                    await context.abort(StatusCode.NOT_FOUND, "not_offered")
                elif first_chunk > len(offer.chunk_digests):
                    raise messages.Malformed(f"there is no chunk {first_chunk}")
                else:
                    self._host.served(peer, await self._serve(offer, first_chunk, context))

    async def _serve(self, offer: Offer, first_chunk: int, context: Context) -> Transfer:
        """Send the list and the chunks, a few of them compressed ahead of the line."""
        loop, started = asyncio.get_running_loop(), _now()
        wire_bytes = 0
        ahead: deque[asyncio.Future[bytes]] = deque()
        chunks = len(offer.chunk_digests)
        with contextlib.closing(_Reader(offer)) as reader:
            try:
                await self._write(context, messages.list_to(offer.raw_bytes, offer.chunk_digests))
                for index in range(first_chunk, chunks):
                    for further in range(
                        index + len(ahead), min(index + limits.CHUNKS_AHEAD, chunks)
                    ):
                        ahead.append(loop.run_in_executor(self.pool, reader.frame, further))
                    frame = await ahead.popleft()
                    await self._write(context, messages.chunk_to(index, frame))
                    wire_bytes += len(frame)
            finally:
                for job in ahead:
                    job.cancel()
        sent_before = first_chunk * CHUNK_BYTES
        return Transfer(max(0, offer.raw_bytes - sent_before), wire_bytes, _now() - started)

    async def _write(self, context: Context, piece: Message) -> None:
        peer = await self._caller(context)
        try:
            async with asyncio.timeout(limits.CHUNK_WRITE_S):
                await context.write(piece)
        except TimeoutError:
            # The status waits in line behind the chunk that the reader does not take.  Until it
            # does, or its connection ends, it blocks its own places, but nobody else's.
            self._stalled += 1
            try:
                await self._deny(context, StatusCode.DEADLINE_EXCEEDED, "slow_reader", peer)
            finally:
                self._stalled -= 1

    @contextlib.asynccontextmanager
    async def _call(self, context: Context) -> AsyncIterator[PeerName]:
        """Every call runs inside this: who calls, and how each way of failing is answered."""
        peer = await self._caller(context)
        try:
            yield peer
        except messages.Malformed as error:
            self._host.denied("malformed", peer)
            await context.abort(StatusCode.INVALID_ARGUMENT, str(error))
        except PeerError as error:
            message = str(error).removeprefix(f"{peer}: ")
            await context.abort(StatusCode.FAILED_PRECONDITION, f"{error.reason}: {message}")
        except grpc.aio.AbortError:
            raise
        except grpc.aio.InternalError:
            # The peer hung up in the middle of an answer, which gRPC would log as our failure.
            raise asyncio.CancelledError from None
        except Exception:
            # gRPC would send the exception's text, and with it paths and values, to the peer.
            _log.exception("a call of %s failed", peer)
            await context.abort(StatusCode.INTERNAL, "internal error")

    async def _caller(self, context: Context) -> PeerName:
        """The pinned peer on the line; for anybody else the call ends here."""
        tls = context.auth_context()
        pem = next(iter(tls.get("x509_pem_cert", ())), b"")
        peer = self._peers.get(_fingerprint_of(pem)) if pem else None
        if peer is None:
            self._doorway.enter(context.peer())  # counted here, not again as a handshake
            await self._deny(context, StatusCode.PERMISSION_DENIED, "unknown_peer", None)
        # Newer gRPC tells the version; its own clients always speak 1.3.
        if next(iter(tls.get("ssl_tls_version", ())), b"TLSv1.3") != b"TLSv1.3":
            await self._deny(context, StatusCode.PERMISSION_DENIED, "old_tls", peer)
        self._doorway.enter(context.peer())
        return peer

    async def _deny(
        self, context: Context, code: StatusCode, reason: str, peer: PeerName | None
    ) -> NoReturn:
        self._host.denied(reason, peer)
        await context.abort(code, reason)
        raise AssertionError("abort always raises")

    def _busy(self, peer: PeerName) -> bool:
        return (
            self._fetches[peer] >= limits.FETCHES_PER_PEER_MAX
            or self._fetches.total() - self._stalled >= limits.FETCHES_MAX
        )

    @contextlib.contextmanager
    def _counted(self, peer: PeerName) -> Iterator[None]:
        self._fetches[peer] += 1
        try:
            yield
        finally:
            self._fetches[peer] -= 1


class _Reader:
    """The offered file, open as long as it is being sent: the store may delete it meanwhile."""

    def __init__(self, offer: Offer) -> None:
        self._raw_bytes = offer.raw_bytes
        self._file = offer.path.open("rb", buffering=0)
        # A thread may still be reading when a call is cancelled; closing waits for it.
        self._lock = threading.Lock()

    def frame(self, index: int) -> bytes:
        length = chunk_length(self._raw_bytes, index)
        with self._lock:
            raw = os.pread(self._file.fileno(), length, index * CHUNK_BYTES)
        if len(raw) != length:
            raise OSError(f"chunk {index} of a stored update has {len(raw)} bytes, not {length}")
        return encode_chunk(raw)

    def close(self) -> None:
        with self._lock:
            self._file.close()


@lru_cache(maxsize=256)
def _fingerprint_of(pem: bytes) -> Fingerprint:
    return fingerprint(ssl.PEM_cert_to_DER_cert(pem.decode()))


def _now() -> float:
    return asyncio.get_running_loop().time()
