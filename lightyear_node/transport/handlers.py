"""Handlers of the RPCs, and how each failure is reported to the caller.

Owns the path from a request's bytes to the answer's, for a peer that TLS has authenticated, whether
the request arrived at our port or as a reverse call (`reverse_calls`).  Must not know what an
answer means: the host (the node) decides that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc import StatusCode

from lightyear_node.errors import DamagedFile, PeerError, Shortage
from lightyear_node.transport import limits, messages
from lightyear_node.transport.messages import Message
from lightyear_node.transport.rate_limits import RateLimits, RequestKind
from lightyear_node.transport.upload_cache import EncodedUpload, Upload, UploadCache
from lightyear_node.types import (
    CHUNK_BYTES,
    Announcement,
    Digest,
    Hello,
    PeerName,
    Reason,
    Transfer,
)
from lightyear_node.v1 import exchange_pb2 as pb

_log = logging.getLogger(__name__)

Send = Callable[[Message], Awaitable[None]]
"""Writes one piece of a fetch; returns when gRPC has accepted it."""


class Denied(Exception):
    """A call is refused; the caller learns code and details, nothing else."""

    def __init__(self, code: StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class Host(Protocol):
    """The node behind the handlers; the reason of a `PeerError` raised here reaches the caller."""

    async def hello(self, peer: PeerName, hello: Hello) -> Hello: ...

    async def announce(self, peer: PeerName, announcement: Announcement) -> Announcement: ...

    async def offer(self, peer: PeerName, digest: Digest) -> Upload | None: ...

    def upload_finished(self, peer: PeerName, transfer: Transfer) -> None: ...

    def upload_failed(self, peer: PeerName, reason: Reason) -> None: ...

    def denied(self, reason: str, peer: PeerName | None) -> None:
        """A call was refused; without a peer, its caller is not a known one."""

    def damaged(self, problem: DamagedFile) -> None:
        """One of our updates cannot be sent: the file is no longer what was signed."""

    def strangers_closed(self, count: int) -> None:
        """Unauthenticated connections beyond the limits were closed."""


class Handlers:
    """To be made and used within one event loop."""

    def __init__(self, host: Host, scratch: Path, faulty_max: int = 0) -> None:
        self.rate_limits = RateLimits(faulty_max)
        self._host = host
        self._uploads = UploadCache(scratch)

    def free_disk_space(self) -> None:
        """Delete the encoded updates that no peer is fetching."""
        self._uploads.drop_idle()

    def close(self) -> None:
        self._uploads.close()

    @contextlib.contextmanager
    def call(self, peer: PeerName, kind: RequestKind) -> Iterator[None]:
        """Runs every call: applies the rate limits, and raises every failure as `Denied`."""
        with self.rate_limits.count_call(peer, kind) as too_many:
            exceeded = too_many or self.rate_limits.rate_exceeded(peer, kind, _now())
            if exceeded is not None:
                self._host.denied(exceeded, peer)
                raise Denied(StatusCode.RESOURCE_EXHAUSTED, exceeded)
            try:
                yield
            except (Denied, grpc.aio.BaseError, grpc.RpcError):
                raise  # refused already, or disconnected
            except (messages.Malformed, DecodeError) as error:
                self._host.denied("malformed", peer)
                if self.rate_limits.strike(peer, _now()):
                    text = "%s keeps sending malformed messages; its calls are refused for a while"
                    _log.warning(text, peer, extra={"event": "rubbish", "peer": peer})
                raise Denied(StatusCode.INVALID_ARGUMENT, str(error)) from None
            except PeerError as error:
                about = f"{error.reason}: {error.message_for_peer}"
                raise Denied(StatusCode.FAILED_PRECONDITION, about) from None
            except DamagedFile as error:
                self._host.damaged(error)
                raise Denied(StatusCode.DATA_LOSS, "damaged") from None
            except Shortage:
                raise Denied(StatusCode.RESOURCE_EXHAUSTED, "no_resources") from None
            except Exception:
                # gRPC would send the exception's text, with paths and values, to the peer.
                extra = {"event": "call", "peer": peer}
                _log.exception("a call of %s failed", peer, extra=extra)
                raise Denied(StatusCode.INTERNAL, "internal error") from None

    async def hello(self, peer: PeerName, request: bytes) -> Message:
        hello = messages.hello_from(parsed(pb.Greeting, request))
        return messages.hello_to(await self._host.hello(peer, hello))

    async def announce(self, peer: PeerName, request: bytes) -> Message:
        announcement = messages.announcement_from(parsed(pb.Announcement, request))
        return messages.announcement_to(await self._host.announce(peer, announcement))

    async def fetch(self, peer: PeerName, request: bytes, send: Send) -> None:
        digest, first_chunk, delta = messages.fetch_from(parsed(pb.FetchRequest, request))
        offer = await self._host.offer(peer, digest)
        if offer is None:
            raise Denied(StatusCode.NOT_FOUND, "not_offered")
        if first_chunk > len(offer.chunk_digests):
            raise messages.Malformed(f"there is no chunk {first_chunk}")
        started = _now()
        with self._uploads.open(offer, delta) as encoded:
            try:
                await _timed(send(messages.list_to(offer.grid.raw_bytes, offer.chunk_digests)))
                wire_bytes = await _send_chunks(
                    encoded, range(first_chunk, offer.grid.chunks), send
                )
            except TimeoutError:
                self._host.denied("slow_reader", peer)
                self._host.upload_failed(peer, Reason.TIMEOUT)
                raise Denied(StatusCode.DEADLINE_EXCEEDED, "slow_reader") from None
            except BaseException:
                # The peer has disconnected, or the call was cancelled.
                self._host.upload_failed(peer, Reason.TRUNCATED)
                raise
        raw_bytes = max(0, offer.grid.raw_bytes - first_chunk * CHUNK_BYTES)
        self._host.upload_finished(peer, Transfer(raw_bytes, wire_bytes, _now() - started))


async def _send_chunks(encoded: EncodedUpload, chunks: range, send: Send) -> int:
    """Send chunks, encoding a few ahead.  Returns the number of bytes sent."""
    loop = asyncio.get_running_loop()
    wire_bytes = 0
    ahead: deque[asyncio.Task[bytes]] = deque()
    try:
        for index in chunks:
            while len(ahead) < limits.CHUNKS_AHEAD and index + len(ahead) < chunks.stop:
                ahead.append(loop.create_task(encoded.frame(index + len(ahead))))
            frame = await ahead.popleft()
            await _timed(send(messages.chunk_to(index, frame)))
            wire_bytes += len(frame)
    finally:
        for encoding in ahead:
            encoding.cancel()
        await asyncio.gather(*ahead, return_exceptions=True)
    return wire_bytes


async def _timed(sending: Awaitable[None]) -> None:
    async with asyncio.timeout(limits.CHUNK_WRITE_S):
        await sending


def parsed(kind: type[Message], request: bytes) -> Message:
    """Parse a request; one that is too long is refused unread."""
    if len(request) > limits.SMALL_MESSAGE_BYTES_MAX:
        raise messages.Malformed(f"a request of {len(request)} bytes")
    return kind.FromString(request)


def _now() -> float:
    return asyncio.get_running_loop().time()
