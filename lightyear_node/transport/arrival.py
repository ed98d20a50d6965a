"""From the line to the disk: the chunks of one stream, decoded, checked and written.

Owns the order and the number of chunks at work at the same time.  Must not know where they come
from.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import IO

from lightyear_node.records import CHUNK_BYTES, Manifest, Transfer
from lightyear_node.store import Incoming, Store, chunk_length
from lightyear_node.transport import limits
from lightyear_node.transport.codec import Grid, decode_chunk

Progress = Callable[[int, int], None]
"""Called with the raw bytes that are safely here, and how many there will be."""


@contextlib.contextmanager
def opened_base(manifest: Manifest, store: Store) -> Iterator[IO[bytes] | None]:
    """The update from which differences are wanted, if it is here; open, so that it stays."""
    try:
        file = store.path(manifest.base).open("rb", buffering=0) if manifest.base else None
    except FileNotFoundError:
        file = None
    with file or contextlib.nullcontext():
        yield file


class Arrival:
    """Decoding runs in threads, a few chunks at a time; checking and writing keep their order, so
    that the length of the partial file says what it holds."""

    def __init__(
        self, incoming: Incoming, grid: Grid, base: IO[bytes] | None, on_progress: Progress
    ) -> None:
        self._incoming = incoming
        self._grid = grid
        self._base = base
        self._on_progress = on_progress
        self._first_chunk = incoming.next_chunk
        self._wire_bytes = 0
        self._room = asyncio.Semaphore(limits.CHUNKS_BEHIND)
        self._landing: set[asyncio.Task[None]] = set()
        self._last: asyncio.Task[None] | None = None

    @property
    def missing(self) -> range:
        return range(self._first_chunk, self._incoming.chunks)

    @property
    def moved(self) -> Transfer:
        raw_bytes = self._incoming.done_bytes - self._first_chunk * CHUNK_BYTES
        return Transfer(max(0, raw_bytes), self._wire_bytes, 0.0)

    async def take(self, index: int, frame: bytes) -> None:
        """Start on a chunk; waits while too many others are under way."""
        self._wire_bytes += len(frame)
        await self._room.acquire()
        if self._last is not None and self._last.done():
            self._last.result()
        landing = self._land(index, frame, self._last)
        self._last = asyncio.get_running_loop().create_task(landing)
        self._landing.add(self._last)
        self._last.add_done_callback(self._landed)

    async def taken(self) -> None:
        """Wait for all that has come; raises for the first chunk that is not what it should be."""
        if self._last is not None:
            await asyncio.shield(self._last)

    async def settle(self) -> None:
        """Nothing of this is at work any more when this returns: a thread cannot be stopped."""
        await asyncio.gather(*self._landing, return_exceptions=True)

    async def _land(self, index: int, frame: bytes, before: asyncio.Task[None] | None) -> None:
        loop = asyncio.get_running_loop()
        raw = await loop.run_in_executor(None, self._decode, index, frame)
        if before is not None:
            await asyncio.shield(before)
        await loop.run_in_executor(None, self._incoming.write, raw)
        self._on_progress(self._incoming.done_bytes, self._incoming.raw_bytes)

    def _landed(self, landing: asyncio.Task[None]) -> None:
        self._room.release()
        self._landing.discard(landing)
        # Whoever waits for the last one hears of the first failure; the others' are no news.
        _ = landing.cancelled() or landing.exception()

    def _decode(self, index: int, frame: bytes) -> memoryview:
        """In a thread."""
        base = None
        if self._base is not None:
            length = chunk_length(self._grid.raw_bytes, index)
            base = os.pread(self._base.fileno(), length, index * CHUNK_BYTES)
        return decode_chunk(self._grid, index, frame, base)
