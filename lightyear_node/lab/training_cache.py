"""Results of training on disk, by key: jobs of an experiment train the same round once.

An entry is one file: the SHA-256 of the rest, a line of JSON, the trained model and the training
state.  It is renamed into place when it is complete, and copied out, never linked, so that no job
can change it.  A damaged entry is deleted and counts as missing.  Several processes may use the
same folder.  Nothing here raises if the disk is full: the job trains, as without a cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from lightyear_node.storage.atomic_files import SUFFIX, staged
from lightyear_node.types import Digest

PIECE_BYTES = 1 << 20
FREE_BYTES_MIN = 2 << 30
"""Entries are deleted, and none is added, if the disk has less free space than this."""
SHARE_BETWEEN_SCANS = 64
"""The folder is listed again after this fraction of its limit was written."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Where entries are, how many bytes they may take, and what all keys of the run contain."""

    folder: str
    bytes_max: int
    package: Mapping[str, Any]
    """Of `package_inputs`."""
    data: Mapping[str, str]
    """Digests of the prepared data files by path."""

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        return cls(**plain)


@dataclass(frozen=True, slots=True)
class CachedTraining:
    """The result of a training, apart from its two files."""

    samples: int
    metrics: Mapping[str, float]
    generator: str
    """State of torch's global random generator afterwards, in hexadecimal."""


class TrainingCache:
    """One process's access to the folder."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self._folder, self._bytes_max = folder, bytes_max
        self._budget = 0
        """Bytes that may be written before the folder is listed again."""
        self.hits = 0

    def fetch(self, key: Digest, own: Path, carry_out: Path) -> CachedTraining | None:
        """Write the files of an entry; None, and no file, if there is no intact one."""
        path = self._folder / key
        try:
            with path.open("rb") as file:
                if not _is_intact(file):
                    path.unlink(missing_ok=True)
                    return None
                header = json.loads(file.readline())
                with staged(own, carry_out) as parts:
                    for part, size in zip(parts, header.pop("sizes"), strict=True):
                        _copy(file, part, size)
            with contextlib.suppress(OSError):  # deleted by another process
                os.utime(path)
        except OSError:
            return None
        self.hits += 1
        return CachedTraining(**header)

    def store(self, key: Digest, own: Path, carry_out: Path, result: CachedTraining) -> None:
        """Add an entry if there is room for it."""
        path = self._folder / key
        sizes = [own.stat().st_size, carry_out.stat().st_size]
        try:
            if path.exists() or not self._has_room(sum(sizes)):
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            with staged(path, suffix=f".{os.getpid()}{SUFFIX}") as [part], part.open("wb") as file:
                _write(file, {**asdict(result), "sizes": sizes}, (own, carry_out))
        except OSError:
            return
        self._budget -= sum(sizes)

    def _has_room(self, size: int) -> bool:
        """Delete the least recently used entries, if that is necessary."""
        if size <= self._budget or size > self._bytes_max:
            return size <= self._budget
        self._folder.mkdir(parents=True, exist_ok=True)
        entries = sorted(_entries(self._folder))
        used = sum(entry_size for _, entry_size, _ in entries)
        spare = shutil.disk_usage(self._folder).free - FREE_BYTES_MIN
        allowed = min(self._bytes_max, used + spare)
        wanted = max(size, min(self._bytes_max, allowed) // SHARE_BETWEEN_SCANS)
        for _, entry_size, path in entries:
            if used + wanted <= allowed:
                break
            path.unlink(missing_ok=True)
            used -= entry_size
        self._budget = wanted if used + wanted <= allowed else 0
        return size <= self._budget


def remove_unfinished(folder: Path) -> None:
    """Delete what killed processes have left; no other process may use the folder."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f"*{SUFFIX}"):
            path.unlink(missing_ok=True)


def _entries(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Time of the last use, size and path of each entry."""
    with os.scandir(folder) as found:
        for entry in found:
            with contextlib.suppress(FileNotFoundError):  # deleted by another process
                about = entry.stat()
                yield about.st_mtime_ns, about.st_size, Path(entry.path)


def _write(file: BinaryIO, header: Mapping[str, Any], contents: tuple[Path, ...]) -> None:
    digest = hashlib.sha256()
    file.write(bytes(digest.digest_size))
    line = json.dumps(header).encode() + b"\n"
    digest.update(line)
    file.write(line)
    for path in contents:
        with path.open("rb") as source:
            while piece := source.read(PIECE_BYTES):
                digest.update(piece)
                file.write(piece)
    file.seek(0)
    file.write(digest.digest())


def _is_intact(file: BinaryIO) -> bool:
    """Compare the digest with what follows it; the file is then at the first byte after it."""
    digest_bytes = hashlib.sha256().digest_size
    expected = file.read(digest_bytes)
    found = hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]
    file.seek(digest_bytes)
    return found == expected


def _copy(source: BinaryIO, target: Path, size: int) -> None:
    with target.open("wb") as out:
        while size and (piece := source.read(min(size, PIECE_BYTES))):
            out.write(piece)
            size -= len(piece)
