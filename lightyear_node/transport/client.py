"""The side that calls: one client for each peer.

Owns the connection and its deadlines.  Must not know rounds, nor when to try again: every failure
leaves here as a `PeerError` that says who should do what.

The peer's pinned certificates are the only roots of its connection, so that TLS itself refuses
everybody else, whatever the address resolves to.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc import StatusCode

from lightyear_node.errors import PeerMisbehaved, PeerUnreachable
from lightyear_node.identity import Certificate, Identity
from lightyear_node.records import (
    CHUNK_BYTES,
    Announcement,
    Hello,
    Manifest,
    PeerName,
    Reason,
    Transfer,
)
from lightyear_node.store import AlreadyIncoming, ChunkRefused, Incoming, Store, chunk_length
from lightyear_node.transport import limits, messages
from lightyear_node.transport.codec import FrameRefused, decode_chunk
from lightyear_node.transport.failures import explain
from lightyear_node.transport.messages import Message
from lightyear_node.v1 import exchange_pb2_grpc

Progress = Callable[[int, int], None]
"""Called with the raw bytes that are safely here, and how many there will be."""
_LINE_BROKE = (
    StatusCode.UNAVAILABLE,
    StatusCode.CANCELLED,
    StatusCode.ABORTED,
    StatusCode.INTERNAL,
    StatusCode.UNKNOWN,
    StatusCode.DATA_LOSS,
)
Call = Any
"""gRPC's running stream; its type parameters would be generated messages."""


class PeerClient:
    """Calls one peer; to be made and used within one event loop."""

    def __init__(
        self,
        peer: PeerName,
        address: str,
        certificates: Sequence[Certificate],
        identity: Identity,
    ) -> None:
        if not certificates:
            # gRPC takes no roots to mean every public authority.
            raise ValueError(f"{peer} has no pinned certificate")
        credentials = grpc.ssl_channel_credentials(
            root_certificates=b"".join(certificate.pem for certificate in certificates),
            private_key=identity.tls_key_pem,
            certificate_chain=identity.certificate.pem,
        )
        # The certificate bears the site's name, not the address's.
        options = (*limits.CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", peer))
        self.peer = peer
        self.address = address
        self._channel = grpc.aio.secure_channel(address, credentials, options=options)
        self._stub = exchange_pb2_grpc.ExchangeStub(self._channel)

    async def close(self) -> None:
        """Calls still running are cancelled."""
        await self._channel.close()

    async def hello(self, hello: Hello) -> Hello:
        with self._blamed():
            reply = await self._stub.Hello(messages.hello_to(hello), timeout=limits.CALL_S)
            return messages.hello_from(reply)

    async def announce(self, announcement: Announcement) -> Announcement:
        with self._blamed():
            request = messages.announcement_to(announcement)
            reply = await self._stub.Announce(request, timeout=limits.CALL_S)
            return messages.announcement_from(reply)

    async def fetch(
        self,
        manifest: Manifest,
        store: Store,
        expected_header: bytes,
        on_progress: Progress = lambda done, total: None,
    ) -> Transfer:
        """Bring the manifest's weights into the store, going on where an earlier fetch ended."""
        started = _now()
        if store.has(manifest.update.digest):
            return Transfer(0, 0, 0.0)
        with self._blamed():
            call, incoming = await self._begin(manifest, store, expected_header)
            first_chunk = incoming.next_chunk
            try:
                wire_bytes = await self._receive(call, incoming, on_progress)
                await asyncio.to_thread(incoming.finish)
            finally:
                call.cancel()
                # In a thread: it waits for one that still writes, or syncs, after a cancellation.
                await asyncio.to_thread(incoming.close)
        received = max(0, manifest.raw_bytes - first_chunk * CHUNK_BYTES)
        return Transfer(received, wire_bytes, _now() - started)

    async def _begin(
        self, manifest: Manifest, store: Store, expected_header: bytes
    ) -> tuple[Call, Incoming]:
        """Ask for what is missing, and open the file for it by the list that comes first."""
        digest = manifest.update.digest
        first_chunk = store.partial_chunks(digest, manifest.raw_bytes)
        while True:
            call = self._stub.Fetch(messages.fetch_to(digest, first_chunk, False))
            try:
                piece = await self._read(call)
                if piece is None:
                    raise PeerUnreachable(self.peer, Reason.TRUNCATED, "sent nothing")
                raw_bytes, chunk_digests = messages.list_from(piece)
                if raw_bytes > manifest.raw_bytes:
                    raise ChunkRefused(Reason.TOO_LARGE, f"{raw_bytes} bytes are on offer")
                incoming = await _opened(store, digest, raw_bytes, chunk_digests, expected_header)
            except BaseException:
                call.cancel()
                raise
            if incoming.next_chunk == first_chunk:
                return call, incoming
            # Only now is the partial file checked; it has less, or more, than its length said.
            first_chunk = incoming.next_chunk
            incoming.close()
            call.cancel()

    async def _receive(self, call: Call, incoming: Incoming, on_progress: Progress) -> int:
        """Take the missing chunks; the next one is on its way while one is written."""
        loop = asyncio.get_running_loop()
        wire_bytes = 0
        writing: asyncio.Future[None] = loop.create_future()
        writing.set_result(None)
        for due in range(incoming.next_chunk, incoming.chunks):
            try:
                frame = await self._frame(call, due)
            finally:
                # Also when the line breaks: what is wrong with a chunk outranks that.
                await writing
            on_progress(incoming.done_bytes, incoming.raw_bytes)
            wire_bytes += len(frame)
            writing = loop.run_in_executor(None, _take, incoming, frame)
        await writing
        on_progress(incoming.done_bytes, incoming.raw_bytes)
        # Every byte is here and verified: unless something follows, it does not matter how the
        # stream ends.
        with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
            if await self._read(call) is not None:
                raise ChunkRefused(Reason.TOO_LARGE, "more chunks than its list has")
        return wire_bytes

    async def _frame(self, call: Call, due: int) -> bytes:
        try:
            piece = await self._read(call)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _LINE_BROKE:
                raise
            raise PeerUnreachable(
                self.peer, Reason.TRUNCATED, f"the line broke before chunk {due}"
            ) from None
        if piece is None:
            raise PeerUnreachable(
                self.peer, Reason.TRUNCATED, f"the stream ended before chunk {due}"
            )
        return messages.chunk_from(piece, due)

    async def _read(self, call: Call) -> Message | None:
        """The next piece, or None at the end of the stream."""
        async with asyncio.timeout(limits.CHUNK_READ_S):
            piece = await _unbroken(call.read())
        return None if piece is grpc.aio.EOF else piece

    @contextlib.contextmanager
    def _blamed(self) -> Iterator[None]:
        """Everything that can go wrong with a peer, as an error that names the peer."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise explain(self.peer, self.address, error) from None
        except TimeoutError:
            raise PeerUnreachable(
                self.peer, Reason.TIMEOUT, f"no chunk came for {limits.CHUNK_READ_S:.0f} s"
            ) from None
        except messages.Malformed as error:
            raise PeerMisbehaved(self.peer, Reason.MALFORMED, str(error)) from None
        except (ChunkRefused, FrameRefused) as error:
            raise PeerMisbehaved(self.peer, error.reason, str(error)) from None
        except AlreadyIncoming:
            raise PeerUnreachable(
                self.peer, Reason.UNREACHABLE, "the same update is just coming from another peer"
            ) from None


async def _unbroken(read: Coroutine[Any, Any, Any]) -> Any:
    """Await gRPC's read; if that is cancelled, the read itself goes on until its call ends.

    gRPC frees a message only at the end of the read that receives it: one that is cancelled while
    it waits leaks the next chunk, a megabyte each time.
    """
    reading = asyncio.get_running_loop().create_task(read)
    # How a read ends that nobody awaits any more is no news.
    reading.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return await asyncio.shield(reading)


async def _opened(*arguments: Any) -> Incoming:
    """Open in a thread, since the partial file is hashed; and close again if nobody waits."""
    opening = asyncio.get_running_loop().run_in_executor(None, Incoming.open, *arguments)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close_late)
        raise


def _close_late(opening: asyncio.Future[Incoming]) -> None:
    if opening.exception() is None:
        opening.result().close()


def _take(incoming: Incoming, frame: bytes) -> None:
    """In a thread: decompress, check and write one chunk."""
    incoming.write(decode_chunk(frame, chunk_length(incoming.raw_bytes, incoming.next_chunk)))


def _now() -> float:
    return asyncio.get_running_loop().time()
