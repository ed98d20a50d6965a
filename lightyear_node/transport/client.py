"""The side that calls: one client for each peer.

Owns deadlines, and what of an answer may be believed.  Must not know rounds: every failure leaves
here as a `PeerError` that says who should do what.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError
from grpc import StatusCode

from lightyear_node.errors import PeerError, PeerMisbehaved, PeerUnreachable
from lightyear_node.records import (
    Announcement,
    Hello,
    Manifest,
    PeerName,
    Reason,
    Transfer,
)
from lightyear_node.store import AlreadyIncoming, ChunkRefused, Incoming, Store
from lightyear_node.transport import limits, messages
from lightyear_node.transport.arrival import Arrival, Progress, opened_base
from lightyear_node.transport.codec import FrameRefused, Grid
from lightyear_node.transport.failures import explain
from lightyear_node.transport.lines import Line, LineFailed, Stream
from lightyear_node.transport.messages import Message

_LINE_BROKE = (
    StatusCode.UNAVAILABLE,
    StatusCode.CANCELLED,
    StatusCode.ABORTED,
    StatusCode.INTERNAL,
    StatusCode.UNKNOWN,
    StatusCode.DATA_LOSS,
)


class PeerClient:
    """Calls one peer; to be made and used within one event loop."""

    def __init__(self, peer: PeerName, line: Line) -> None:
        self.peer = peer
        self.line = line
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    async def close(self, grace_s: float = 0.0) -> None:
        """Calls still running after `grace_s` are cut off, and fail as unreachable."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._idle.wait()
        finally:
            self._closed = True
            await self.line.close()

    async def hello(self, hello: Hello) -> Hello:
        with self._blamed():
            return messages.hello_from(await self.line.hello(messages.hello_to(hello)))

    async def announce(self, announcement: Announcement) -> Announcement:
        with self._blamed():
            reply = await self.line.announce(messages.announcement_to(announcement))
            return messages.announcement_from(reply)

    async def fetch(
        self,
        manifest: Manifest,
        store: Store,
        grid: Grid,
        on_progress: Progress = lambda done, total: None,
        on_resume: Callable[[], None] = lambda: None,
    ) -> Transfer:
        """Bring the manifest's weights into the store, however often the line breaks.

        What has arrived is kept, and asked for no more; a few breaks in a row without any progress
        end it, and the next fetch of the same update goes on from there.  `on_resume` is called at
        each break that does not end it.
        """
        started, total, failures, here = _now(), Transfer(0, 0, 0.0), 0, 0
        with self._at_work():
            while not store.has(manifest.update.digest):
                try:
                    total += await self._fetch_once(manifest, store, grid, on_progress)
                except _Cut as cut:
                    total += cut.moved
                    failures = 0 if cut.done_bytes > here else failures + 1
                    here = max(here, cut.done_bytes)
                    if self._closed or failures > limits.FETCH_TRIES or not cut.worth_another_try:
                        raise cut.problem from None
                    on_resume()
                    await asyncio.sleep(random.uniform(0, _pause_s(failures)))
        return Transfer(total.raw_bytes, total.wire_bytes, _now() - started)

    async def _fetch_once(
        self, manifest: Manifest, store: Store, grid: Grid, on_progress: Progress
    ) -> Transfer:
        with opened_base(manifest, store) as base:
            try:
                with self._blamed():
                    stream, incoming = await self._begin(manifest, store, base is not None)
            except PeerUnreachable as problem:
                raise _Cut(problem, Transfer(0, 0, 0.0), 0) from None
            arrival = Arrival(incoming, grid, base, on_progress)
            try:
                with self._blamed():
                    await self._receive(stream, arrival)
                    await asyncio.to_thread(incoming.finish)
            except PeerUnreachable as problem:
                raise _Cut(problem, arrival.moved, incoming.done_bytes) from None
            finally:
                stream.cancel()
                await arrival.settle()
                # In a thread: it waits for one that still writes, or syncs, after a cancellation.
                await asyncio.to_thread(incoming.close)
        return arrival.moved

    async def _begin(
        self, manifest: Manifest, store: Store, delta: bool
    ) -> tuple[Stream, Incoming]:
        """Ask for what is missing, and open the file for it by the list that comes first."""
        digest = manifest.update.digest
        first_chunk = store.partial_chunks(digest, manifest.raw_bytes)
        while True:
            stream = self.line.fetch(messages.fetch_to(digest, first_chunk, delta))
            try:
                piece = await _read(stream)
                if piece is None:
                    raise PeerUnreachable(self.peer, Reason.TRUNCATED, "sent nothing")
                raw_bytes, chunk_digests = messages.list_from(piece)
                if raw_bytes > manifest.raw_bytes:
                    raise ChunkRefused(Reason.TOO_LARGE, f"{raw_bytes} bytes are on offer")
                incoming = await _opened(store, digest, raw_bytes, chunk_digests)
            except BaseException:
                stream.cancel()
                raise
            if incoming.next_chunk == first_chunk:
                return stream, incoming
            # Only now is the partial file checked; it has less, or more, than its length said.
            first_chunk = incoming.next_chunk
            incoming.close()
            stream.cancel()

    async def _receive(self, stream: Stream, arrival: Arrival) -> None:
        """Take the missing chunks; some are decoded and written while the next are on their way."""
        for due in arrival.missing:
            try:
                frame = await self._frame(stream, due)
            except BaseException:
                # What is wrong with a chunk that has come outranks that the line broke.
                await arrival.taken()
                raise
            await arrival.take(due, frame)
        await arrival.taken()
        # Every byte is here and verified: unless something follows, it does not matter how the
        # stream ends.
        with contextlib.suppress(LineFailed, TimeoutError):
            if await _read(stream) is not None:
                raise ChunkRefused(Reason.TOO_LARGE, "more chunks than its list has")

    async def _frame(self, stream: Stream, due: int) -> bytes:
        try:
            piece = await _read(stream)
        except LineFailed as failure:
            if failure.code not in _LINE_BROKE:
                raise
            raise PeerUnreachable(
                self.peer, Reason.TRUNCATED, f"the line broke before chunk {due}"
            ) from None
        if piece is None:
            raise PeerUnreachable(
                self.peer, Reason.TRUNCATED, f"the stream ended before chunk {due}"
            )
        return messages.chunk_from(piece, due)

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    @contextlib.contextmanager
    def _blamed(self) -> Iterator[None]:
        """Everything that can go wrong with a peer, as an error that names the peer."""
        try:
            with self._at_work():
                yield
        except (asyncio.CancelledError, grpc.aio.UsageError):
            # gRPC ends a closed channel's calls as if the caller had been cancelled.
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
            raise PeerUnreachable(
                self.peer, Reason.UNREACHABLE, "the settings have changed meanwhile"
            ) from None
        except LineFailed as failure:
            raise explain(self.peer, self.line.address, failure.code, failure.details) from None
        except TimeoutError:
            raise PeerUnreachable(
                self.peer, Reason.TIMEOUT, f"no chunk came for {limits.CHUNK_READ_S:.0f} s"
            ) from None
        except (messages.Malformed, DecodeError) as error:
            raise PeerMisbehaved(self.peer, Reason.MALFORMED, str(error)) from None
        except (ChunkRefused, FrameRefused) as error:
            raise PeerMisbehaved(self.peer, error.reason, str(error)) from None
        except AlreadyIncoming:
            raise PeerUnreachable(
                self.peer, Reason.UNREACHABLE, "the same update is just coming from another peer"
            ) from None


class _Cut(Exception):
    """A fetch ended early; what it has brought is kept."""

    def __init__(self, problem: PeerError, moved: Transfer, done_bytes: int) -> None:
        super().__init__(str(problem))
        self.problem = problem
        self.moved = moved
        self.done_bytes = done_bytes

    @property
    def worth_another_try(self) -> bool:
        """Broken lines and busy sites; who was silent for too long may have lost its turn."""
        return self.problem.reason in (Reason.TRUNCATED, Reason.UNREACHABLE)


async def _read(stream: Stream) -> Message | None:
    """The next piece, or None at the end of the stream."""
    async with asyncio.timeout(limits.CHUNK_READ_S):
        return await stream.read()


async def _opened(*arguments: Any) -> Incoming:
    """Open in a thread, since a partial file is hashed; and close again if nobody waits."""
    opening = asyncio.get_running_loop().run_in_executor(None, Incoming.open, *arguments)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close_late)
        raise


def _close_late(opening: asyncio.Future[Incoming]) -> None:
    if opening.exception() is None:
        opening.result().close()


def _pause_s(failures: int) -> float:
    return min(limits.FETCH_PAUSE_S * 2.0**failures, limits.FETCH_PAUSE_S_MAX)


def _now() -> float:
    return asyncio.get_running_loop().time()
