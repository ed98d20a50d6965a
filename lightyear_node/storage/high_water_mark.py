"""The high-water mark of a journal: the newest committed record, stored outside the database.

SQLite ignores its write-ahead log from the first damaged frame on, so committed records can vanish
without an error.  This one-line file detects that.  It is written after each commit and not synced,
so it never names a record that was not durable.  After a power cut it may be older than the
journal, which is harmless.  An invalid mark is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from lightyear_node.storage.file_descriptors import exhaustion_raised

_BYTES_MAX = 256


@dataclass(frozen=True, slots=True)
class HighWaterMark:
    seq: int
    hash: str

    def line(self) -> str:
        content = f"{self.seq:020d} {self.hash}"
        return f"{content} {_check(content)}\n"


def mark_path(journal: Path) -> Path:
    return journal.with_suffix(".mark")


def read_mark(journal: Path) -> HighWaterMark | None:
    """Read the mark; None if there is no valid one."""
    path = mark_path(journal)
    try:
        with exhaustion_raised(str(path)), path.open(encoding="ascii") as file:
            content, _, check = file.read(_BYTES_MAX).rstrip("\n").rpartition(" ")
        if check != _check(content):
            return None
        seq, hash = content.split(" ")
        return HighWaterMark(int(seq), hash)
    except (OSError, ValueError):
        return None


class MarkFile:
    """Writes the mark; overwrites one line in place, so a full disk does not matter."""

    def __init__(self, journal: Path) -> None:
        self._path = mark_path(journal)
        self._file: int | None = None

    def write(self, mark: HighWaterMark) -> None:
        """Write the mark; errors are ignored, because an older mark is harmless."""
        with contextlib.suppress(OSError):
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.pwrite(self._file, mark.line().encode("ascii"), 0)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _check(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()[:16]
