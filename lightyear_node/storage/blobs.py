"""Weights files, named by the digest of their content.

A file gets the name of a digest only after all its bytes were hashed and synced.  Only digests
become paths, so strings from peers cannot.  Peers, rounds and tensors are unknown here.

The digest of a file is SHA-256 over its length and the SHA-256 of each of its chunks.  A receiver
that has checked the list of chunk hashes against the digest can check, keep and resume each chunk
on its own, and each byte is hashed once: a plain SHA-256 of the file would need a second pass.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import struct
import threading
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from typing import IO, Self

from lightyear_node.errors import DamagedFile, DiskFull, Shortage, StoreError
from lightyear_node.storage.atomic_files import UnsyncedRename, rename_durably
from lightyear_node.storage.file_descriptors import shortage
from lightyear_node.types import CHUNK_BYTES, Digest, Reason

_DOMAIN = b"LYTREE1\0"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PART = ".part"
_SCRATCH = ".tmp"

CHUNK_LISTS_KEPT = 32
"""Chunk lists kept in memory, each 32 bytes per MiB of weights; others are computed again."""


class ChunkRefused(ValueError):
    """Received bytes that are no valid frame or do not match their digest: the sender's fault."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class AlreadyDownloading(Exception):
    """Another transfer is writing the same content; retry when it has ended."""


@dataclass(frozen=True, slots=True)
class StoredBlob:
    digest: Digest
    raw_bytes: int


def tree_digest(raw_bytes: int, chunk_digests: Iterable[bytes]) -> Digest:
    tree = hashlib.sha256(_DOMAIN + struct.pack("<Q", raw_bytes))
    for chunk_digest in chunk_digests:
        tree.update(chunk_digest)
    return Digest(tree.hexdigest())


def chunk_count(raw_bytes: int) -> int:
    return -(-raw_bytes // CHUNK_BYTES)


def chunk_length(raw_bytes: int, index: int) -> int:
    """Raw bytes in chunk `index` of a file of this size; only the last may be short."""
    return min(CHUNK_BYTES, raw_bytes - index * CHUNK_BYTES)


def read_chunk(file: IO[bytes], index: int, chunk_digest: bytes) -> bytes:
    """Read a chunk of an open weights file; raises `DamagedFile` if its hash differs."""
    try:
        raw = os.pread(file.fileno(), CHUNK_BYTES, index * CHUNK_BYTES)
    except OSError as error:
        raise DamagedFile(f"chunk {index} of {file.name}: {error.strerror or error}") from error
    if hashlib.sha256(raw).digest() != chunk_digest:
        raise DamagedFile(f"chunk {index} of {file.name} is damaged")
    return raw


def hash_file(path: Path) -> tuple[Digest, int, tuple[bytes, ...]]:
    with _disk(path), path.open("rb") as file:
        return hash_stream(file)


def hash_stream(file: BufferedReader) -> tuple[Digest, int, tuple[bytes, ...]]:
    """Hash an open file in one pass, with one chunk in memory."""
    chunk_digests = []
    raw_bytes = 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    # A buffered readinto fills the buffer except at the end of the file.
    while length := file.readinto(buffer):
        chunk_digests.append(hashlib.sha256(buffer[:length]).digest())
        raw_bytes += length
    return tree_digest(raw_bytes, chunk_digests), raw_bytes, tuple(chunk_digests)


class BlobStore:
    """A folder of weights files; thread-safe."""

    def __init__(self, folder: Path, suffix: str = "") -> None:
        self.folder = folder
        self._suffix = suffix
        self._lists: dict[Digest, tuple[bytes, ...]] = {}
        self._receiving: set[Digest] = set()
        self._adopted: set[Digest] = set()
        # Chunks that this process has checked in each partial file.  No other process writes them,
        # so a resumed transfer need not hash them again.
        self._checked_chunks: dict[Digest, int] = {}
        self._lock = threading.Lock()
        with _disk(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, digest: Digest) -> Path:
        return self.folder / f"{_checked(digest)}{self._suffix}"

    def has(self, digest: Digest) -> bool:
        return self.path(digest).is_file()

    def size(self, digest: Digest) -> int | None:
        """Length of a complete file in bytes; None if there is none."""
        with _disk(self.path(digest)):
            try:
                return self.path(digest).stat().st_size
            except FileNotFoundError:
                return None

    def scratch_path(self) -> Path:
        """A new path for a file that is written before `adopt`."""
        return self.folder / f"{secrets.token_hex(16)}{_SCRATCH}"

    def adopt(self, temp_path: Path) -> StoredBlob:
        """Sync a finished file and rename it to its digest; the same content may exist already."""
        digest, raw_bytes, chunk_digests = hash_file(temp_path)
        with self._lock:
            self._adopted.add(digest)
        with _disk(temp_path), temp_path.open("rb") as file:
            _sync(temp_path, file.fileno())
        self._publish(temp_path, digest, chunk_digests)
        return StoredBlob(digest, raw_bytes)

    def complete_files(self) -> set[Digest]:
        return self._named(self._suffix)

    def partial_files(self) -> set[Digest]:
        return self._named(_PART)

    def largest(self) -> int:
        """Size of the largest file in bytes."""
        with _disk(self.folder):
            return max((entry.stat().st_size for entry in self.folder.iterdir()), default=0)

    def in_use(self) -> set[Digest]:
        """Files that are being received, or were adopted since the last `retain`."""
        with self._lock:
            return self._receiving | self._adopted

    def chunk_digests(self, digest: Digest) -> tuple[bytes, ...]:
        """The hashes of the file's chunks; the file is read and checked only the first time.

        Raises `DamagedFile` if it cannot be read or does not match its name.
        """
        with self._lock:
            known = self._lists.get(digest)
        if known is not None:
            return known
        try:
            actual, _, chunk_digests = hash_file(self.path(digest))
        except Shortage:
            raise  # the file may be intact
        except StoreError as problem:
            raise DamagedFile(str(problem)) from problem
        if actual != digest:
            raise DamagedFile(f"{self.path(digest)} is damaged: its content has digest {actual}")
        self._remember(digest, chunk_digests)
        return chunk_digests

    def verify(self, digest: Digest) -> bool:
        """Whether the file exists, can be read, and matches its digest."""
        try:
            return self.has(digest) and hash_file(self.path(digest))[0] == digest
        except Shortage:
            raise  # the file may be intact
        except StoreError:
            return False

    def partial_chunks(self, digest: Digest, raw_bytes: int) -> int:
        """Number of whole chunks, not verified, that an interrupted transfer has left."""
        part = self.part_path(digest)
        with _disk(part):
            try:
                size = min(part.stat().st_size, raw_bytes)
            except FileNotFoundError:
                return 0
        return chunk_count(raw_bytes) if size == raw_bytes else size // CHUNK_BYTES

    def retain(self, keep: Set[Digest]) -> None:
        """Delete every file, complete or partial, that is neither in `keep` nor being received."""
        for digest in (self.complete_files() | self.partial_files()) - keep:
            self.discard(digest)
        with self._lock:
            self._adopted &= keep | self._receiving

    def discard(self, digest: Digest) -> None:
        """Delete a file, complete or partial, unless it is being received."""
        with self._lock:
            if digest in self._receiving:
                return
            self._lists.pop(digest, None)
            self._checked_chunks.pop(digest, None)
        with _disk(self.folder):
            self.path(digest).unlink(missing_ok=True)
            self.part_path(digest).unlink(missing_ok=True)

    def clear_scratch(self, *paths: Path) -> None:
        """Delete temporary files: these, and those that the worker derived from their names.

        Without arguments, all that a crash has left; only for the process that owns the folder.
        """
        names = [path.name for path in paths] or [f"*{_SCRATCH}"]
        with _disk(self.folder):
            for name in names:
                for entry in self.folder.glob(f"{name}*"):
                    entry.unlink(missing_ok=True)

    def _named(self, suffix: str) -> set[Digest]:
        ours = re.compile(f"([0-9a-f]{{64}}){re.escape(suffix)}")
        with _disk(self.folder):
            matches = [ours.fullmatch(entry.name) for entry in self.folder.iterdir()]
        return {Digest(match[1]) for match in matches if match}

    def _claim(self, digest: Digest) -> int:
        with self._lock:
            if digest in self._receiving:
                raise AlreadyDownloading(digest)
            self._receiving.add(digest)
            return self._checked_chunks.get(digest, 0)

    def _release(self, digest: Digest, checked_chunks: int) -> None:
        with self._lock:
            self._receiving.discard(digest)
            self._checked_chunks[digest] = checked_chunks

    def part_path(self, digest: Digest) -> Path:
        """Path of a file that is being received."""
        return self.folder / f"{_checked(digest)}{_PART}"

    def _publish(self, path: Path, digest: Digest, chunk_digests: tuple[bytes, ...]) -> None:
        """Rename a complete, synced file to its digest; the name is durable afterwards."""
        with _disk(path):
            try:
                rename_durably(path, self.path(digest))
            except UnsyncedRename as error:  # never a shortage: there is no file left to retry with
                raise StoreError(f"{self.folder}: {error.strerror or error}") from error
        self._remember(digest, chunk_digests)

    def _remember(self, digest: Digest, chunk_digests: tuple[bytes, ...]) -> None:
        with self._lock:
            self._lists[digest] = chunk_digests
            if len(self._lists) > CHUNK_LISTS_KEPT:
                del self._lists[next(iter(self._lists))]


class IncomingBlob:
    """A file that is received in order, each chunk checked on its own.

    Received chunks stay in `<digest>.part` for the next attempt; the length of that file is the
    progress.  A new process hashes them again, because they were not synced.
    """

    def __init__(
        self,
        store: BlobStore,
        digest: Digest,
        raw_bytes: int,
        chunk_digests: tuple[bytes, ...],
        file: FileIO,
    ) -> None:
        self.raw_bytes = raw_bytes
        self.chunks = len(chunk_digests)
        self.next_chunk = 0
        self._store = store
        self._digest = digest
        self._chunk_digests = chunk_digests
        self._file = file
        self._path = store.part_path(digest)
        # A thread may still be writing a chunk when the transfer is abandoned.  Closing waits for
        # it: otherwise the descriptor could be reused under the writer.
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls, store: BlobStore, digest: Digest, raw_bytes: int, chunk_digests: tuple[bytes, ...]
    ) -> Self:
        """Begin or resume; `next_chunk` is the first chunk that is missing or damaged."""
        if not chunk_digests or len(chunk_digests) != chunk_count(raw_bytes):
            raise ChunkRefused(
                Reason.CHECKSUM, f"{len(chunk_digests)} chunk hashes for {raw_bytes} bytes"
            )
        if tree_digest(raw_bytes, chunk_digests) != digest:
            raise ChunkRefused(Reason.CHECKSUM, "the chunk list does not belong to the digest")
        path = store.part_path(digest)
        checked_chunks = store._claim(digest)
        with contextlib.ExitStack() as undo, _disk(path):
            undo.callback(store._release, digest, 0)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            file = undo.enter_context(FileIO(os.open(path, flags, 0o600), "r+"))
            incoming = cls(store, digest, raw_bytes, chunk_digests, file)
            incoming._resume(checked_chunks)
            undo.pop_all()
        return incoming

    @property
    def complete(self) -> bool:
        return self.next_chunk == self.chunks

    @property
    def done_bytes(self) -> int:
        return min(self.next_chunk * CHUNK_BYTES, self.raw_bytes)

    def write(self, raw: bytes | memoryview) -> None:
        """Check and write the next chunk; raises `ChunkRefused`."""
        with self._lock, _disk(self._path):
            self._check(raw)
            rest, begin = memoryview(raw), self.next_chunk * CHUNK_BYTES
            while rest:  # on a full disk one write is short, and the next one fails
                written = os.pwrite(self._file.fileno(), rest, begin)
                rest, begin = rest[written:], begin + written
            self.next_chunk += 1

    def finish(self) -> None:
        """Sync the complete file and rename it to its digest."""
        with self._lock, _disk(self._path):
            if not self.complete:
                raise ValueError(f"chunk {self.next_chunk} is still missing")
            self._file.truncate(self.raw_bytes)
            try:
                _sync(self._path, self._file.fileno())
            except OSError:
                self.next_chunk = 0
                raise
            self._store._publish(self._path, self._digest, self._chunk_digests)
        self.close()

    def close(self) -> None:
        """Keep received chunks for the next transfer; closing twice does nothing."""
        with self._lock:
            if not self._file.closed:
                self._file.close()
                self._store._release(self._digest, self.next_chunk)

    def _resume(self, checked_chunks: int) -> None:
        free = os.statvfs(self._path)
        size = os.fstat(self._file.fileno()).st_size
        missing = self.raw_bytes - size
        if missing > free.f_bavail * free.f_frsize:
            raise DiskFull(f"{self._path.parent}: no room for {missing} more bytes")
        self.next_chunk = min(checked_chunks, size // CHUNK_BYTES)
        while not self.complete:
            length = chunk_length(self.raw_bytes, self.next_chunk)
            raw = os.pread(self._file.fileno(), length, self.next_chunk * CHUNK_BYTES)
            if hashlib.sha256(raw).digest() != self._chunk_digests[self.next_chunk]:
                return
            self.next_chunk += 1

    def _check(self, raw: bytes | memoryview) -> None:
        index = self.next_chunk
        if self.complete:
            raise ChunkRefused(Reason.TOO_LARGE, f"there is no chunk {index}")
        if len(raw) != chunk_length(self.raw_bytes, index):
            raise ChunkRefused(Reason.CHECKSUM, f"chunk {index} has {len(raw)} bytes")
        if hashlib.sha256(raw).digest() != self._chunk_digests[index]:
            raise ChunkRefused(Reason.CHECKSUM, f"chunk {index} does not have its hash")


def _checked(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"{digest!r} is not a digest")
    return digest


def _sync(path: Path, fd: int) -> None:
    """Sync a file; delete it on failure, because a second fsync could succeed wrongly."""
    try:
        os.fsync(fd)
    except OSError:
        path.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Translate OSError into StoreError, with the path."""
    try:
        yield
    except OSError as error:
        found = shortage(path, error) or StoreError(f"{path}: {error.strerror or error}")
        raise found from error
