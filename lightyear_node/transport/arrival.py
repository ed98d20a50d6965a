"""From the line to the disk: the chunks of one stream, decoded, checked and written.

Owns the order and the number of chunks at work at the same time.  Must not know where they come
from.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO

from lightyear_node.records import CHUNK_BYTES, Manifest, Transfer
from lightyear_node.store import Incoming, Store, chunk_length
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
        # The manifest may name any file of ours, and one that is damaged is nobody's base.
        fits = file is not None and os.fstat(file.fileno()).st_size == manifest.raw_bytes
        yield file if fits else None


class Arrival:
    """A thread decodes, checks and writes one chunk while the next is on its way.

    In order, so that the length of the partial file says what it holds; and no two at the same
    time, since handing work to more threads costs more than they save.
    """

    def __init__(
        self, incoming: Incoming, grid: Grid, base: IO[bytes] | None, on_progress: Progress
    ) -> None:
        self._incoming = incoming
        self._grid = grid
        self._base = base
        self._on_progress = on_progress
        self._first_chunk = incoming.next_chunk
        self._wire_bytes = 0
        self._buffer = bytearray(CHUNK_BYTES)
        # Always the same thread, which knows the buffer.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="arrival")
        self._landing: asyncio.Future[None] | None = None

    @property
    def missing(self) -> range:
        return range(self._first_chunk, self._incoming.chunks)

    @property
    def moved(self) -> Transfer:
        raw_bytes = self._incoming.done_bytes - self._first_chunk * CHUNK_BYTES
        return Transfer(max(0, raw_bytes), self._wire_bytes, 0.0)

    async def take(self, index: int, frame: bytes) -> None:
        """Start on a chunk, when the one before is done."""
        self._wire_bytes += len(frame)
        await self.taken()
        loop = asyncio.get_running_loop()
        self._landing = loop.run_in_executor(self._thread, self._land, index, frame)
        self._landing.add_done_callback(self._landed)

    async def taken(self) -> None:
        """Wait for what has come; raises if that is not what it should be."""
        if self._landing is not None:
            await asyncio.shield(self._landing)

    async def settle(self) -> None:
        """Nothing of this is at work any more when this returns: a thread cannot be stopped."""
        if self._landing is not None:
            await asyncio.wait([self._landing])
        self._thread.shutdown(wait=False)

    def _landed(self, landing: asyncio.Future[None]) -> None:
        if not landing.cancelled() and landing.exception() is None:
            self._on_progress(self._incoming.done_bytes, self._incoming.raw_bytes)

    def _land(self, index: int, frame: bytes) -> None:
        """In a thread."""
        base = None
        if self._base is not None:
            length = chunk_length(self._grid.raw_bytes, index)
            base = os.pread(self._base.fileno(), length, index * CHUNK_BYTES)
        self._incoming.write(decode_chunk(self._grid, index, frame, base, self._buffer))
