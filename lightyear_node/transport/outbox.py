"""Our updates as they cross the wire: encoded once, however many peers fetch them.

Owns the encoded copies: files without a name in the state directory, which are gone with the
process.  A chunk is encoded when the first peer asks for it, in a thread, and read back for all
others, so that nobody waits for the end of a large model, and no more than the chunks on their way
are in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lightyear_node.records import CHUNK_BYTES, Digest
from lightyear_node.store import chunk_length
from lightyear_node.transport.codec import Grid, encode_chunk

COPIES_KEPT = 3
"""The newest update in both forms, and one that a slow peer is still fetching."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Offer:
    """An update that a peer may have."""

    digest: Digest
    path: Path
    chunk_digests: tuple[bytes, ...]
    grid: Grid
    base: Path | None = None
    """Our update before it, for who has that one."""


class Copy:
    """One update in one form, encoded as far as anybody has asked for it."""

    def __init__(self, offer: Offer, delta: bool, folder: Path, pool: ThreadPoolExecutor) -> None:
        self._grid = offer.grid
        self._pool = pool
        # Open as long as the copy lives: the store may delete the files meanwhile.
        with contextlib.ExitStack() as undo:
            self._raw = undo.enter_context(offer.path.open("rb", buffering=0))
            self._base: IO[bytes] | None = None
            if delta and offer.base is not None:
                with contextlib.suppress(FileNotFoundError):  # then in full
                    self._base = undo.enter_context(offer.base.open("rb", buffering=0))
            self._packed: IO[bytes] | None = None
            try:
                self._packed = undo.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
            except OSError as problem:
                _complain(problem)
            self._files = undo.pop_all()
        self._spans: list[tuple[int, int]] = []
        self._encoding = asyncio.Lock()
        # A thread may still be at work when the call that wanted it is cancelled; closing waits.
        self._working = threading.Lock()
        self.users = 0

    async def frame(self, index: int) -> bytes:
        """Chunk `index`, encoded now if it never was."""
        loop = asyncio.get_running_loop()
        async with self._encoding:
            while self._packed is not None and len(self._spans) <= index:
                packing = loop.run_in_executor(self._pool, self._pack, len(self._spans))
                try:
                    await asyncio.shield(packing)
                except asyncio.CancelledError:
                    await asyncio.wait([packing])  # or the next one would pack the same chunk
                    raise
        return await loop.run_in_executor(self._pool, self._read, index)

    def close(self) -> None:
        with self._working:
            self._files.close()

    def _pack(self, index: int) -> None:
        """In a thread: encode one chunk and append it."""
        frame = self._encode(index)
        with self._working:
            begin = sum(self._spans[-1]) if self._spans else 0
            assert self._packed is not None
            try:
                written = os.pwrite(self._packed.fileno(), frame, begin)
            except OSError as problem:
                _complain(problem)
                written = 0
            if written == len(frame):
                self._spans.append((begin, len(frame)))
            else:
                self._packed = None

    def _read(self, index: int) -> bytes:
        with self._working:
            if self._packed is not None and index < len(self._spans):
                begin, length = self._spans[index]
                return os.pread(self._packed.fileno(), length, begin)
        return self._encode(index)

    def _encode(self, index: int) -> bytes:
        length = chunk_length(self._grid.raw_bytes, index)
        with self._working:
            raw = os.pread(self._raw.fileno(), length, index * CHUNK_BYTES)
            base = None
            if self._base is not None:
                base = os.pread(self._base.fileno(), length, index * CHUNK_BYTES)
        if len(raw) != length:
            raise OSError(f"chunk {index} of a stored update has {len(raw)} bytes, not {length}")
        if base is not None and len(base) != length:
            base = None
        return encode_chunk(self._grid, index, raw, base)


def _complain(problem: OSError) -> None:
    """A copy saves work and nothing else: on a full disk every peer's is made anew."""
    text = "encoded updates cannot be kept: %s"
    _log.warning(text, problem.strerror, extra={"event": "disk"})


class Outbox:
    """To be used within one event loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._copies: OrderedDict[tuple[Digest, bool], Copy] = OrderedDict()
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="encode")

    @contextlib.contextmanager
    def lend(self, offer: Offer, delta: bool) -> Iterator[Copy]:
        """The encoded update, which stays open as long as it is being sent."""
        delta = delta and offer.base is not None
        name = (offer.digest, delta)
        copy = self._copies.get(name) or Copy(offer, delta, self._folder, self._pool)
        self._copies[name] = copy
        self._copies.move_to_end(name)
        copy.users += 1
        try:
            self._tidy()
            yield copy
        finally:
            copy.users -= 1
            self._tidy()

    def shed(self) -> None:
        """Give the disk back what saves work and nothing else."""
        for name in [name for name, copy in self._copies.items() if copy.users == 0]:
            self._copies.pop(name).close()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for copy in self._copies.values():
            copy.close()
        self._copies.clear()

    def _tidy(self) -> None:
        """Close the copies that nobody has asked for lately."""
        idle = [name for name, copy in self._copies.items() if copy.users == 0]
        for name in idle[: max(0, len(self._copies) - COPIES_KEPT)]:
            self._copies.pop(name).close()
