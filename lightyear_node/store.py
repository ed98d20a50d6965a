"""Weights on disk: files named by the digest of their content.

Owns the tree digest, and the rule that a file bears a digest's name only after every byte of it was
hashed and is durable.  Must not know peers, rounds or tensors; nothing but a digest ever becomes a
path, so that no string of a peer can.

The digest of a file is SHA-256 over its length and the SHA-256 of each of its chunks.  A receiver
that has checked the list of chunk hashes against the digest can check, keep and resume every chunk
alone, and each byte is hashed once: a plain SHA-256 of the file would cost a second pass.
"""

from __future__ import annotations

import contextlib
import errno
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
from typing import Self

from lightyear_node.errors import DiskFull, StoreError
from lightyear_node.records import CHUNK_BYTES, Digest, Reason

_DOMAIN = b"LYTREE1\0"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PART = ".part"
_SCRATCH = ".tmp"
_FULL = (errno.ENOSPC, errno.EDQUOT)

_LISTS_KEPT = 32
"""Chunk lists kept in memory, 32 bytes per MiB of weights each; the rest are hashed again."""


class ChunkRefused(ValueError):
    """Bytes that are not what their digest promised; whoever sent them is to blame."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class AlreadyIncoming(Exception):
    """Another transfer is writing the same content; when it ends, there is nothing to fetch."""


@dataclass(frozen=True, slots=True)
class Stored:
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
    """How many raw bytes chunk `index` of a file of this size has; only the last may be short."""
    return min(CHUNK_BYTES, raw_bytes - index * CHUNK_BYTES)


def hash_file(path: Path) -> tuple[Digest, int, tuple[bytes, ...]]:
    with _disk(path), path.open("rb") as file:
        return hash_stream(file)


def hash_stream(file: BufferedReader) -> tuple[Digest, int, tuple[bytes, ...]]:
    """One pass over an open file, one chunk in memory."""
    chunk_digests = []
    raw_bytes = 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    # A buffered readinto fills the buffer except at the end of the file.
    while length := file.readinto(buffer):
        chunk_digests.append(hashlib.sha256(buffer[:length]).digest())
        raw_bytes += length
    return tree_digest(raw_bytes, chunk_digests), raw_bytes, tuple(chunk_digests)


class Store:
    """One folder of weights files.  Its methods may be called from any thread."""

    def __init__(self, folder: Path, suffix: str = "") -> None:
        self.folder = folder
        self._suffix = suffix
        self._lists: dict[Digest, tuple[bytes, ...]] = {}
        self._arriving: set[Digest] = set()
        self._adopted: set[Digest] = set()
        # Whole chunks that this process has checked in each partial file.  Nobody else writes them,
        # so that a line that breaks every second does not cost hashing all of it every second.
        self._checked_chunks: dict[Digest, int] = {}
        self._lock = threading.Lock()
        with _disk(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, digest: Digest) -> Path:
        return self.folder / f"{_checked(digest)}{self._suffix}"

    def has(self, digest: Digest) -> bool:
        return self.path(digest).is_file()

    def scratch_path(self) -> Path:
        """A new name to write a file under before `adopt` takes it."""
        return self.folder / f"{secrets.token_hex(16)}{_SCRATCH}"

    def adopt(self, temp_path: Path) -> Stored:
        """Name a finished file by its content and make it durable; it may be there already."""
        digest, raw_bytes, chunk_digests = hash_file(temp_path)
        with self._lock:
            self._adopted.add(digest)
        with _disk(temp_path), temp_path.open("rb") as file:
            _sync(temp_path, file.fileno())
        self._publish(temp_path, digest, chunk_digests)
        return Stored(digest, raw_bytes)

    def whole(self) -> set[Digest]:
        """Every complete file."""
        return self._named(self._suffix)

    def parts(self) -> set[Digest]:
        """Every file of which a piece has arrived."""
        return self._named(_PART)

    def largest(self) -> int:
        """The size of the largest file."""
        with _disk(self.folder):
            return max((entry.stat().st_size for entry in self.folder.iterdir()), default=0)

    def busy(self) -> set[Digest]:
        """What is just arriving, or was made here since the last `retain`: not to be touched."""
        with self._lock:
            return self._arriving | self._adopted

    def chunk_digests(self, digest: Digest) -> tuple[bytes, ...]:
        """The hashes of the file's chunks; the file is read, and checked, only the first time."""
        with self._lock:
            known = self._lists.get(digest)
        if known is not None:
            return known
        actual, _, chunk_digests = hash_file(self.path(digest))
        if actual != digest:
            raise StoreError(f"{self.path(digest)} is damaged: its content has digest {actual}")
        self._remember(digest, chunk_digests)
        return chunk_digests

    def verify(self, digest: Digest) -> bool:
        """Whether the file is there and every byte of it is still right."""
        return self.has(digest) and hash_file(self.path(digest))[0] == digest

    def partial_chunks(self, digest: Digest, raw_bytes: int) -> int:
        """How many whole chunks an interrupted transfer left behind, as yet unverified."""
        part = self._part(digest)
        with _disk(part):
            try:
                size = min(part.stat().st_size, raw_bytes)
            except FileNotFoundError:
                return 0
        return chunk_count(raw_bytes) if size == raw_bytes else size // CHUNK_BYTES

    def retain(self, keep: Set[Digest]) -> list[Digest]:
        """Delete every file, whole or partial, that is neither in `keep` nor just arriving."""
        removed = []
        with self._lock:
            keep = keep | self._arriving
        ours = re.compile(f"([0-9a-f]{{64}})({re.escape(self._suffix)}|{re.escape(_PART)})")
        with _disk(self.folder):
            for entry in sorted(self.folder.iterdir()):
                match = ours.fullmatch(entry.name)
                if match and match[1] not in keep:
                    entry.unlink(missing_ok=True)
                    removed.append(Digest(match[1]))
        with self._lock:
            self._adopted &= keep
            for digest in removed:
                self._forget(digest)
        return removed

    def discard(self, digest: Digest) -> None:
        """Delete a file, whole or in part; one that is just arriving stays."""
        with self._lock:
            if digest in self._arriving:
                return
            self._forget(digest)
        with _disk(self.folder):
            self.path(digest).unlink(missing_ok=True)
            self._part(digest).unlink(missing_ok=True)

    def clear_scratch(self, *paths: Path) -> None:
        """Delete what was left half written: these files, and whatever the worker made of them.

        Without any, all that a crash has left; only for the one process that owns the folder.
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

    def _forget(self, digest: Digest) -> None:
        self._lists.pop(digest, None)
        self._checked_chunks.pop(digest, None)

    def _claim(self, digest: Digest) -> int:
        with self._lock:
            if digest in self._arriving:
                raise AlreadyIncoming(digest)
            self._arriving.add(digest)
            return self._checked_chunks.get(digest, 0)

    def _release(self, digest: Digest, checked_chunks: int) -> None:
        with self._lock:
            self._arriving.discard(digest)
            self._checked_chunks[digest] = checked_chunks

    def _part(self, digest: Digest) -> Path:
        return self.folder / f"{_checked(digest)}{_PART}"

    def _publish(self, path: Path, digest: Digest, chunk_digests: tuple[bytes, ...]) -> None:
        """Rename a complete, synced file to its digest and make the name durable too."""
        with _disk(path):
            path.rename(self.path(digest))
        try:
            fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:  # whatever it is: a directory cannot be written anew
            raise StoreError(f"{self.folder}: {error.strerror or error}") from error
        self._remember(digest, chunk_digests)

    def _remember(self, digest: Digest, chunk_digests: tuple[bytes, ...]) -> None:
        with self._lock:
            self._lists[digest] = chunk_digests
            if len(self._lists) > _LISTS_KEPT:
                del self._lists[next(iter(self._lists))]


class Incoming:
    """A file that arrives chunk by chunk, in order, and is believed chunk by chunk.

    What has arrived stays in `<digest>.part` whatever happens; its length is the record of how far
    it got.  A new process hashes it again, because nothing in it was synced.
    """

    def __init__(
        self,
        store: Store,
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
        self._path = store._part(digest)
        # A chunk may still be written in a thread when the transfer is abandoned; closing waits,
        # lest the descriptor's number be reused under the writer.
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls, store: Store, digest: Digest, raw_bytes: int, chunk_digests: tuple[bytes, ...]
    ) -> Self:
        """Begin or resume; `next_chunk` is then the first chunk that is missing or damaged."""
        if len(chunk_digests) != chunk_count(raw_bytes):
            raise ChunkRefused(
                Reason.CHECKSUM, f"{len(chunk_digests)} chunk hashes for {raw_bytes} bytes"
            )
        if tree_digest(raw_bytes, chunk_digests) != digest:
            raise ChunkRefused(Reason.CHECKSUM, "the chunk list does not belong to the digest")
        path = store._part(digest)
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
        """Take the next chunk, if it is the one that its hash promises."""
        with self._lock, _disk(self._path):
            self._check(raw)
            rest, begin = memoryview(raw), self.next_chunk * CHUNK_BYTES
            while rest:  # the last write before a disk is full is short; the next one says why
                written = os.pwrite(self._file.fileno(), rest, begin)
                rest, begin = rest[written:], begin + written
            self.next_chunk += 1

    def finish(self) -> None:
        """Make the complete file durable and give it its name."""
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
        """What has arrived stays for the next transfer; closing twice does nothing."""
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
    """A file that could not be synced goes: a second attempt would succeed, and mean nothing."""
    try:
        os.fsync(fd)
    except OSError:
        path.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Turn the disk's errors into ours; the file's name says where to look."""
    try:
        yield
    except OSError as error:
        kind = DiskFull if error.errno in _FULL else StoreError
        raise kind(f"{path}: {error.strerror or error}") from error
