"""Encoded copies of our updates: encoded once, whatever the number of peers that fetch them.

Owns the copies: unlinked temporary files in the state directory, which end with the process.  A
thread encodes a chunk when the first peer requests it; for the others it is read back.  So no peer
waits for the encoding of a whole model, and only chunks in flight are in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lightyear_node.errors import DamagedFile
from lightyear_node.storage.blobs import read_chunk
from lightyear_node.storage.file_descriptors import exhaustion_raised
from lightyear_node.transport import limits
from lightyear_node.transport.codec import ChunkGrid, encode_chunk
from lightyear_node.types import Digest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UploadBase:
    """Our previous update, to which differences are encoded."""

    path: Path
    chunk_digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Upload:
    """One of our updates that peers may fetch."""

    digest: Digest
    path: Path
    chunk_digests: tuple[bytes, ...]
    grid: ChunkGrid
    base: UploadBase | None = None
    """For peers that hold it; the others get the full update."""


class EncodedUpload:
    """One update, full or as differences, encoded up to the last chunk requested so far."""

    def __init__(self, upload: Upload, delta: bool, folder: Path, pool: ThreadPoolExecutor) -> None:
        self._upload = upload
        self._pool = pool
        # Kept open, since the store may delete the files meanwhile.
        with exhaustion_raised("an update for a peer"), contextlib.ExitStack() as undo:
            self._raw = undo.enter_context(upload.path.open("rb", buffering=0))
            self._base: IO[bytes] | None = None
            if delta and upload.base is not None and _fits(upload, upload.base):
                with contextlib.suppress(FileNotFoundError):  # then the full update is sent
                    self._base = undo.enter_context(upload.base.path.open("rb", buffering=0))
            self._copy: IO[bytes] | None = None
            try:
                self._copy = undo.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
            except OSError as problem:
                _warn_not_kept(problem)
            self._files = undo.pop_all()
        self._spans: list[tuple[int, int, int]] = []
        """Offset, length and checksum of each encoded chunk; the disk may damage it."""
        self._encode_lock = asyncio.Lock()
        # A thread may still run after its caller was cancelled; closing waits for it.
        self._file_lock = threading.Lock()
        self.users = 0

    async def frame(self, index: int) -> bytes:
        """Chunk `index`, encoded now if it has not been before."""
        loop = asyncio.get_running_loop()
        async with self._encode_lock:
            while self._copy is not None and len(self._spans) <= index:
                encoding = loop.run_in_executor(self._pool, self._append, len(self._spans))
                # Consume the result: after a cancellation asyncio would log it as never retrieved.
                encoding.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
                try:
                    await asyncio.shield(encoding)
                except asyncio.CancelledError:
                    await asyncio.wait([encoding])  # or the next caller would encode the same chunk
                    raise
        return await loop.run_in_executor(self._pool, self._read, index)

    def close(self) -> None:
        with self._file_lock:
            self._files.close()

    def _append(self, index: int) -> None:
        """Encode one chunk and append it to the file; runs in a thread."""
        frame = self._encode(index)
        with self._file_lock:
            begin = sum(self._spans[-1][:2]) if self._spans else 0
            if self._copy is None:  # another thread has found the disk full
                return
            try:
                written = os.pwrite(self._copy.fileno(), frame, begin)
            except OSError as problem:
                _warn_not_kept(problem)
                written = 0
            if written == len(frame):
                self._spans.append((begin, len(frame), zlib.crc32(frame)))
            else:
                self._copy = None

    def _read(self, index: int) -> bytes:
        with self._file_lock:
            if self._copy is not None and index < len(self._spans):
                begin, length, checksum = self._spans[index]
                frame = os.pread(self._copy.fileno(), length, begin)
                if zlib.crc32(frame) == checksum:
                    return frame
        return self._encode(index)

    def _encode(self, index: int) -> bytes:
        """Raises `DamagedFile` if the stored bytes are not those that we have signed."""
        upload = self._upload
        with self._file_lock:
            raw = read_chunk(self._raw, index, upload.chunk_digests[index])
            base = None
            if self._base is not None and upload.base is not None:
                try:
                    base = read_chunk(self._base, index, upload.base.chunk_digests[index])
                except DamagedFile as problem:
                    text = "%s: our update is sent in full"
                    _log.warning(text, problem, extra={"event": "damaged"})
                    self._base = None
        if base is not None and len(base) != len(raw):
            base = None
        return encode_chunk(upload.grid, index, raw, base)


def _fits(upload: Upload, base: UploadBase) -> bool:
    return len(base.chunk_digests) == len(upload.chunk_digests)


def _warn_not_kept(problem: OSError) -> None:
    """Without a copy, on a full disk, chunks are encoded again for every peer."""
    text = "encoded updates cannot be kept: %s"
    _log.warning(text, problem.strerror, extra={"event": "disk"})


class UploadCache:
    """The encoded updates; to be used within one event loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._encoded: OrderedDict[tuple[Digest, bool], EncodedUpload] = OrderedDict()
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="encode")

    @contextlib.contextmanager
    def open(self, upload: Upload, delta: bool) -> Iterator[EncodedUpload]:
        """The encoded update, which stays open while it is being sent."""
        delta = delta and upload.base is not None
        key = (upload.digest, delta)
        encoded = self._encoded.get(key) or EncodedUpload(upload, delta, self._folder, self._pool)
        self._encoded[key] = encoded
        self._encoded.move_to_end(key)
        encoded.users += 1
        try:
            self._evict()
            yield encoded
        finally:
            encoded.users -= 1
            self._evict()

    def drop_idle(self) -> None:
        """Delete the copies that are not in use, to free disk space."""
        for key in self._idle():
            self._encoded.pop(key).close()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for encoded in self._encoded.values():
            encoded.close()
        self._encoded.clear()

    def _evict(self) -> None:
        """Delete the least recently requested copies."""
        for key in self._idle()[: max(0, len(self._encoded) - limits.ENCODED_UPLOADS_KEPT)]:
            self._encoded.pop(key).close()

    def _idle(self) -> list[tuple[Digest, bool]]:
        return [key for key, encoded in self._encoded.items() if encoded.users == 0]
