"""What peers may ask, and how each way of failing is answered.

Owns the path from a request's bytes to the answer's, for a peer that TLS has identified already,
whichever way the question came: to our own port, or over a line that we have lent (`lending`).
Must not know what an answer means: that is the host's (the node's) business.
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

from lightyear_node.errors import PeerError
from lightyear_node.records import (
    CHUNK_BYTES,
    Announcement,
    Digest,
    Hello,
    PeerName,
    Reason,
    Transfer,
)
from lightyear_node.transport import limits, messages
from lightyear_node.transport.gate import Ask, Gate
from lightyear_node.transport.messages import Message
from lightyear_node.transport.outbox import Copy, Offer, Outbox
from lightyear_node.v1 import exchange_pb2 as pb

_log = logging.getLogger(__name__)

Send = Callable[[Message], Awaitable[None]]
"""Puts one piece of a fetch on the line; returns when the line has taken it."""


class Denied(Exception):
    """The answer is no; code and details are all that the caller learns."""

    def __init__(self, code: StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class Host(Protocol):
    """What the node answers.  A `PeerError` raised here is told to the caller with its reason."""

    async def hello(self, peer: PeerName, hello: Hello) -> Hello: ...

    async def announce(self, peer: PeerName, announcement: Announcement) -> Announcement: ...

    async def offer(self, peer: PeerName, digest: Digest) -> Offer | None: ...

    def served(self, peer: PeerName, transfer: Transfer) -> None: ...

    def not_served(self, peer: PeerName, reason: Reason) -> None: ...

    def denied(self, reason: str, peer: PeerName | None) -> None: ...


class Service:
    """To be made and used within one event loop."""

    def __init__(self, host: Host, scratch: Path, faulty_max: int = 0) -> None:
        self.gate = Gate(faulty_max)
        self._host = host
        self._outbox = Outbox(scratch)

    def shed(self) -> None:
        """The disk is full: drop the encoded updates that nobody is fetching."""
        self._outbox.shed()

    def close(self) -> None:
        self._outbox.close()

    @contextlib.contextmanager
    def call(self, peer: PeerName, ask: Ask) -> Iterator[None]:
        """Every call runs inside this; whatever goes wrong leaves it as `Denied`."""
        with self.gate.enter(peer, ask) as full:
            early = full or self.gate.hurried(peer, ask, _now())
            if early is not None:
                self._host.denied(early, peer)
                raise Denied(StatusCode.RESOURCE_EXHAUSTED, early)
            try:
                yield
            except (Denied, grpc.aio.BaseError, grpc.RpcError):
                raise  # the answer is known, or the line broke under it
            except (messages.Malformed, DecodeError) as error:
                self._host.denied("malformed", peer)
                if self.gate.strike(peer, _now()):
                    text = "%s sends rubbish; it is not listened to for a while"
                    _log.warning(text, peer, extra={"event": "rubbish", "peer": peer})
                raise Denied(StatusCode.INVALID_ARGUMENT, str(error)) from None
            except PeerError as error:
                message = str(error).removeprefix(f"{peer}: ")
                raise Denied(StatusCode.FAILED_PRECONDITION, f"{error.reason}: {message}") from None
            except Exception:
                # gRPC would send the exception's text, and with it paths and values, to the peer.
                about = {"event": "call", "peer": peer}
                _log.exception("a call of %s failed", peer, extra=about)
                raise Denied(StatusCode.INTERNAL, "internal error") from None

    async def hello(self, peer: PeerName, request: bytes) -> Message:
        hello = messages.hello_from(_parsed(pb.Greeting, request))
        return messages.hello_to(await self._host.hello(peer, hello))

    async def announce(self, peer: PeerName, request: bytes) -> Message:
        announcement = messages.announcement_from(_parsed(pb.Announcement, request))
        return messages.announcement_to(await self._host.announce(peer, announcement))

    async def fetch(self, peer: PeerName, request: bytes, send: Send) -> None:
        digest, first_chunk, delta = messages.fetch_from(_parsed(pb.FetchRequest, request))
        offer = await self._host.offer(peer, digest)
        if offer is None:
            raise Denied(StatusCode.NOT_FOUND, "not_offered")
        if first_chunk > len(offer.chunk_digests):
            raise messages.Malformed(f"there is no chunk {first_chunk}")
        started = _now()
        with self._outbox.lend(offer, delta) as copy:
            try:
                await _in_time(send(messages.list_to(offer.grid.raw_bytes, offer.chunk_digests)))
                wire_bytes = await _send_chunks(copy, range(first_chunk, offer.grid.chunks), send)
            except TimeoutError:
                self._host.denied("slow_reader", peer)
                self._host.not_served(peer, Reason.TIMEOUT)
                raise Denied(StatusCode.DEADLINE_EXCEEDED, "slow_reader") from None
            except BaseException:
                # The line broke, or the peer hung up: a cancellation.
                self._host.not_served(peer, Reason.TRUNCATED)
                raise
        raw_bytes = max(0, offer.grid.raw_bytes - first_chunk * CHUNK_BYTES)
        self._host.served(peer, Transfer(raw_bytes, wire_bytes, _now() - started))


async def _send_chunks(copy: Copy, chunks: range, send: Send) -> int:
    """A few of them are encoded ahead of the line.  Returns how many bytes they took."""
    loop = asyncio.get_running_loop()
    wire_bytes = 0
    ahead: deque[asyncio.Task[bytes]] = deque()
    try:
        for index in chunks:
            while len(ahead) < limits.CHUNKS_AHEAD and index + len(ahead) < chunks.stop:
                ahead.append(loop.create_task(copy.frame(index + len(ahead))))
            frame = await ahead.popleft()
            await _in_time(send(messages.chunk_to(index, frame)))
            wire_bytes += len(frame)
    finally:
        for encoding in ahead:
            encoding.cancel()
        await asyncio.gather(*ahead, return_exceptions=True)
    return wire_bytes


async def _in_time(sending: Awaitable[None]) -> None:
    async with asyncio.timeout(limits.CHUNK_WRITE_S):
        await sending


def _parsed(kind: type[Message], request: bytes) -> Message:
    if len(request) > limits.SMALL_MESSAGE_BYTES_MAX:
        raise messages.Malformed(f"a request of {len(request)} bytes")
    return kind.FromString(request)


def _now() -> float:
    return asyncio.get_running_loop().time()
