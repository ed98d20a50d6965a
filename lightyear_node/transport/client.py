"""Client for the calls to one peer.

Owns deadlines, retries and the checks of answers.  Must not know rounds: every failure is raised as
a `PeerError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError
from grpc import StatusCode

from lightyear_node.errors import DamagedFile, PeerError, PeerMisbehaved, PeerUnreachable
from lightyear_node.storage.blobs import AlreadyDownloading, BlobStore, ChunkRefused, IncomingBlob
from lightyear_node.transport import limits, messages
from lightyear_node.transport.channel import ChannelFailed, FetchStream, PeerChannel
from lightyear_node.transport.codec import ChunkGrid
from lightyear_node.transport.download import Download, Progress, opened_base
from lightyear_node.transport.grpc_errors import to_peer_error
from lightyear_node.transport.messages import Message
from lightyear_node.types import Announcement, Digest, Hello, Manifest, PeerName, Reason, Transfer

_DISCONNECTED = (
    StatusCode.UNAVAILABLE,
    StatusCode.CANCELLED,
    StatusCode.ABORTED,
    StatusCode.INTERNAL,
    StatusCode.UNKNOWN,
    StatusCode.DATA_LOSS,
)


class PeerClient:
    """Calls one peer; to be made and used within one event loop."""

    def __init__(self, peer: PeerName, channel: PeerChannel) -> None:
        self.peer = peer
        self.channel = channel
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    async def close(self, grace_s: float = 0.0) -> None:
        """Close the connection; calls that still run after `grace_s` fail as unreachable."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._idle.wait()
        finally:
            self._closed = True
            await self.channel.close()

    async def hello(self, hello: Hello) -> Hello:
        with self._errors_as_peer_errors():
            return messages.hello_from(await self.channel.hello(messages.hello_to(hello)))

    async def announce(self, announcement: Announcement) -> Announcement:
        with self._errors_as_peer_errors():
            reply = await self.channel.announce(messages.announcement_to(announcement))
            return messages.announcement_from(reply)

    async def fetch(
        self,
        manifest: Manifest,
        store: BlobStore,
        grid: ChunkGrid,
        on_progress: Progress = lambda done, total: None,
        on_resume: Callable[[], None] = lambda: None,
        on_damaged: Callable[[Digest], None] = lambda digest: None,
    ) -> Transfer:
        """Download the manifest's weights into the store, and resume after every disconnect.

        Received chunks are kept.  A few failures in a row without progress end the fetch; the next
        one of the same update resumes there.  `on_resume` is called before each retry, `on_damaged`
        if our copy of the previous update is damaged: then this one is fetched in full.
        """
        started, total, failures, stored_bytes = _now(), Transfer(0, 0, 0.0), 0, 0
        with self._running_call():
            while not self._is_stored(manifest, store):
                try:
                    total += await self._fetch_once(manifest, store, grid, on_progress)
                except DamagedFile as problem:
                    if manifest.base is None:
                        raise PeerError(self.peer, Reason.DAMAGED, str(problem)) from problem
                    on_damaged(manifest.base)
                    manifest = replace(manifest, base=None)
                except _FetchInterrupted as interrupted:
                    total += interrupted.transferred
                    failures = 0 if interrupted.stored_bytes > stored_bytes else failures + 1
                    stored_bytes = max(stored_bytes, interrupted.stored_bytes)
                    exhausted = failures > limits.FETCH_RETRIES_MAX
                    if self._closed or exhausted or not interrupted.retriable:
                        raise interrupted.problem from None
                    on_resume()
                    await asyncio.sleep(random.uniform(0, _backoff_s(failures)))
        return Transfer(total.raw_bytes, total.wire_bytes, _now() - started)

    def _is_stored(self, manifest: Manifest, store: BlobStore) -> bool:
        """Whether the store has the file; refuses one of another size than announced."""
        size = store.size(manifest.update.digest)
        if size is not None:
            with self._errors_as_peer_errors():
                _check_size(size, manifest)
        return size is not None

    async def _fetch_once(
        self, manifest: Manifest, store: BlobStore, grid: ChunkGrid, on_progress: Progress
    ) -> Transfer:
        async with opened_base(manifest, store) as base:
            try:
                with self._errors_as_peer_errors():
                    stream, incoming = await self._begin(manifest, store, base is not None)
            except PeerUnreachable as problem:
                raise _FetchInterrupted(problem, Transfer(0, 0, 0.0), 0) from None
            download = Download(incoming, grid, base, on_progress)
            try:
                with self._errors_as_peer_errors():
                    await self._receive(stream, download)
                    await asyncio.to_thread(incoming.finish)
            except PeerUnreachable as problem:
                raise _FetchInterrupted(
                    problem, download.transferred, incoming.done_bytes
                ) from None
            finally:
                stream.cancel()
                await download.stop()
                # In a thread: after a cancellation it waits for another one that still writes.
                await asyncio.to_thread(incoming.close)
        return download.transferred

    async def _begin(
        self, manifest: Manifest, store: BlobStore, delta: bool
    ) -> tuple[FetchStream, IncomingBlob]:
        """Request the missing chunks, and open the file with the chunk list that comes first."""
        digest = manifest.update.digest
        first_chunk = store.partial_chunks(digest, manifest.raw_bytes)
        while True:
            stream = self.channel.fetch(messages.fetch_to(digest, first_chunk, delta))
            try:
                piece = await _read(stream)
                if piece is None:
                    raise PeerUnreachable(self.peer, Reason.TRUNCATED, "sent nothing")
                raw_bytes, chunk_digests = messages.list_from(piece)
                _check_size(raw_bytes, manifest)
                incoming = await _opened(store, digest, manifest.raw_bytes, chunk_digests)
            except BaseException:
                stream.cancel()
                raise
            if incoming.next_chunk == first_chunk:
                return stream, incoming
            # The check of the partial file has found fewer or more valid chunks than expected.
            first_chunk = incoming.next_chunk
            incoming.close()
            stream.cancel()

    async def _receive(self, stream: FetchStream, download: Download) -> None:
        """Receive the missing chunks; one is decoded and written while the next is in flight."""
        for expected in download.missing:
            try:
                frame = await self._frame(stream, expected)
            except BaseException:
                # An invalid chunk takes precedence over the disconnect.
                await download.drain()
                raise
            await download.write(expected, frame)
        await download.drain()
        # Every byte is stored and verified: how the stream ends does not matter, unless more data
        # follows.
        with contextlib.suppress(ChannelFailed, TimeoutError):
            if await _read(stream) is not None:
                raise ChunkRefused(Reason.TOO_LARGE, "more chunks than its list has")

    async def _frame(self, stream: FetchStream, expected: int) -> bytes:
        try:
            piece = await _read(stream)
        except ChannelFailed as failure:
            if failure.code not in _DISCONNECTED:
                raise
            raise PeerUnreachable(
                self.peer, Reason.TRUNCATED, f"the connection broke before chunk {expected}"
            ) from None
        if piece is None:
            raise PeerUnreachable(
                self.peer, Reason.TRUNCATED, f"the stream ended before chunk {expected}"
            )
        return messages.chunk_from(piece, expected)

    @contextlib.contextmanager
    def _running_call(self) -> Iterator[None]:
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    @contextlib.contextmanager
    def _errors_as_peer_errors(self) -> Iterator[None]:
        """Raise every failure of a call as a `PeerError`, which names the peer."""
        try:
            with self._running_call():
                yield
        except (asyncio.CancelledError, grpc.aio.UsageError):
            # When a channel is closed, gRPC ends its calls as if their caller had been cancelled.
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
            raise PeerUnreachable(
                self.peer,
                Reason.UNREACHABLE,
                "closed, since the settings have changed",
            ) from None
        except ChannelFailed as failure:
            raise to_peer_error(
                self.peer, self.channel.address, failure.code, failure.details
            ) from None
        except TimeoutError:
            raise PeerUnreachable(
                self.peer, Reason.TIMEOUT, f"no chunk came for {limits.CHUNK_READ_S:.0f} s"
            ) from None
        except (messages.Malformed, DecodeError) as error:
            raise PeerMisbehaved(self.peer, Reason.MALFORMED, str(error)) from None
        except ChunkRefused as error:
            raise PeerMisbehaved(self.peer, error.reason, str(error)) from None
        except AlreadyDownloading:
            raise PeerUnreachable(
                self.peer,
                Reason.UNREACHABLE,
                "another peer is already sending the same update",
            ) from None


class _FetchInterrupted(Exception):
    """A fetch ended early; the chunks that it has received are kept."""

    def __init__(self, problem: PeerError, transferred: Transfer, stored_bytes: int) -> None:
        super().__init__(str(problem))
        self.problem = problem
        self.transferred = transferred
        self.stored_bytes = stored_bytes

    @property
    def retriable(self) -> bool:
        """Broken connections and busy peers are retried, timeouts are not."""
        return self.problem.reason in (Reason.TRUNCATED, Reason.UNREACHABLE)


def _check_size(raw_bytes: int, manifest: Manifest) -> None:
    """Refuse content whose size is not the manifest's.

    The digest covers the size, but a manifest may state one size and have the digest of another.
    """
    if raw_bytes != manifest.raw_bytes:
        reason = Reason.TOO_LARGE if raw_bytes > manifest.raw_bytes else Reason.CHECKSUM
        raise ChunkRefused(
            reason, f"its digest is of {raw_bytes} bytes, but it announced {manifest.raw_bytes}"
        )


async def _read(stream: FetchStream) -> Message | None:
    """The next piece, or None at the end of the stream."""
    async with asyncio.timeout(limits.CHUNK_READ_S):
        return await stream.read()


async def _opened(*arguments: Any) -> IncomingBlob:
    """Open in a thread, since a partial file is hashed; closed again if the caller is cancelled."""
    opening = asyncio.get_running_loop().run_in_executor(None, IncomingBlob.open, *arguments)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close_opened)
        raise


def _close_opened(opening: asyncio.Future[IncomingBlob]) -> None:
    if opening.exception() is None:
        opening.result().close()


def _backoff_s(failures: int) -> float:
    return min(limits.FETCH_BACKOFF_S * 2.0**failures, limits.FETCH_BACKOFF_S_MAX)


def _now() -> float:
    return asyncio.get_running_loop().time()
