"""Decodes, checks and stores the chunks of one fetch.

Owns their order and how many are processed at once.  Must not know where they come from.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO

from lightyear_node.storage.blobs import BlobStore, IncomingBlob, read_chunk
from lightyear_node.storage.file_descriptors import exhaustion_raised
from lightyear_node.transport.codec import ChunkGrid, decode_chunk, needs_base
from lightyear_node.types import CHUNK_BYTES, Manifest, Transfer

Progress = Callable[[int, int], None]
"""Called with the raw bytes stored so far, and their total."""


@dataclass(frozen=True, slots=True)
class DeltaBase:
    """The update to which differences apply; its file stays open, so that it cannot be deleted."""

    file: IO[bytes]
    chunk_digests: tuple[bytes, ...]

    def chunk(self, index: int) -> bytes:
        """Raises `DamagedFile` if the chunk does not match its hash."""
        return read_chunk(self.file, index, self.chunk_digests[index])


@contextlib.asynccontextmanager
async def opened_base(manifest: Manifest, store: BlobStore) -> AsyncIterator[DeltaBase | None]:
    """Open the update that the manifest is a difference to, if we have it.

    Raises `DamagedFile` if it does not match its digest.  Its chunk hashes are usually known;
    otherwise the file is read once.
    """
    try:
        with exhaustion_raised("the previous update"):
            file = store.path(manifest.base).open("rb", buffering=0) if manifest.base else None
    except FileNotFoundError:
        file = None
    with file or contextlib.nullcontext():
        # The manifest may name any of our files.
        fits = file is not None and os.fstat(file.fileno()).st_size == manifest.raw_bytes
        if not fits or file is None or manifest.base is None:
            yield None
        else:
            yield DeltaBase(file, await asyncio.to_thread(store.chunk_digests, manifest.base))


class Download:
    """A thread decodes, checks and writes one chunk while the next is in flight.

    In order, so that the length of the partial file tells which chunks it has; and one at a time,
    since distributing the work to more threads costs more than it saves.
    """

    def __init__(
        self, incoming: IncomingBlob, grid: ChunkGrid, base: DeltaBase | None, on_progress: Progress
    ) -> None:
        self._incoming = incoming
        self._grid = grid
        self._base = base
        self._on_progress = on_progress
        self._first_chunk = incoming.next_chunk
        self._wire_bytes = 0
        self._buffer = bytearray(CHUNK_BYTES)
        # A single thread, since all chunks use one buffer.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="download")
        self._writing: asyncio.Future[None] | None = None

    @property
    def missing(self) -> range:
        return range(self._first_chunk, self._incoming.chunks)

    @property
    def transferred(self) -> Transfer:
        raw_bytes = self._incoming.done_bytes - self._first_chunk * CHUNK_BYTES
        return Transfer(max(0, raw_bytes), self._wire_bytes, 0.0)

    async def write(self, index: int, frame: bytes) -> None:
        """Start to process a chunk, after waiting for the previous one."""
        self._wire_bytes += len(frame)
        await self.drain()
        loop = asyncio.get_running_loop()
        self._writing = loop.run_in_executor(self._thread, self._write_chunk, index, frame)
        self._writing.add_done_callback(self._report_progress)

    async def drain(self) -> None:
        """Wait for the last chunk; raises if it is invalid."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def stop(self) -> None:
        """Wait until the thread is idle, since it cannot be interrupted."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        self._thread.shutdown(wait=False)

    def _report_progress(self, writing: asyncio.Future[None]) -> None:
        if not writing.cancelled() and writing.exception() is None:
            self._on_progress(self._incoming.done_bytes, self._incoming.raw_bytes)

    def _write_chunk(self, index: int, frame: bytes) -> None:
        """Runs in the thread."""
        base = self._base.chunk(index) if self._base and needs_base(frame) else None
        self._incoming.write(decode_chunk(self._grid, index, frame, base, self._buffer))
