"""Closed segments of a journal: `journal-000001.db` and so on; they never change.

When the journal has grown to `SEGMENT_BYTES`, a compacted copy of it becomes the next segment and
its records are deleted from the live file.  So the live file stays small, and a start verifies only
that.  Each segment is a complete journal at the time it was closed: memory, signatures, and the
list of earlier segments.

The list of closed segments is part of the journal's memory, whose digest is in every record: the
hash chain covers the name, range and SHA-256 of every segment.  A missing segment was moved to an
archive; it is read again when it is put back beside the journal.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightyear_node.storage.atomic_files import staged, sync
from lightyear_node.storage.file_descriptors import exhaustion_raised
from lightyear_node.storage.hash_chain import FIRST_HASH

SEGMENT_BYTES = 4 << 20
"""Some hundred rounds: verified in a fraction of a second at each start."""
MEMORY_KEY = "segments"


@dataclass(frozen=True, slots=True)
class Segment:
    file: str
    first: int
    last: int
    first_hash: str
    last_hash: str
    first_round: int
    last_round: int
    sha256: str


def segments_in(memory: Mapping[str, Any]) -> tuple[Segment, ...]:
    """The closed segments that a journal's memory lists; raises ValueError if it is invalid."""
    listed = json.loads(memory.get(MEMORY_KEY, "[]"))
    try:
        found = tuple(Segment(**one) for one in listed)
    except TypeError as problem:
        raise ValueError(f"the list of segments: {problem}") from None
    for one in found:
        if not isinstance(one.file, str) or Path(one.file).name != one.file:
            raise ValueError("the list of segments names no file")
    return found


def end_of(segments: tuple[Segment, ...]) -> tuple[int, str]:
    """Number and hash of their last record, which the next record follows."""
    return (segments[-1].last, segments[-1].last_hash) if segments else (0, FIRST_HASH)


def present(folder: Path, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """The newest segments, back to the first missing one."""
    for at in range(len(segments) - 1, -1, -1):
        if absent(folder, segments[at]):
            return segments[at + 1 :]
    return segments


def absent(folder: Path, segment: Segment) -> bool:
    return not (folder / segment.file).exists()


def is_intact(folder: Path, segment: Segment) -> bool:
    """Whether the file is unchanged since it was closed."""
    path = folder / segment.file
    try:
        with exhaustion_raised(str(path)):  # the file may be intact
            return file_sha256(path) == segment.sha256
    except OSError:
        return False


def close_segment(db: sqlite3.Connection, folder: Path, closed: tuple[Segment, ...]) -> Segment:
    """Write the content of the live journal as the next segment, durably.

    The live journal is not changed.  A file left by an interrupted attempt is replaced: only files
    listed in the memory are segments.
    """
    name = f"journal-{len(closed) + 1:06d}.db"
    with staged(folder / name) as [part]:
        part.unlink(missing_ok=True)
        db.execute("VACUUM INTO ?", (str(part),))
        sync(part)
        sha256 = file_sha256(part)
        os.chmod(part, 0o400)
    sync(folder)
    first, last, first_round, last_round = db.execute(
        "SELECT min(seq), max(seq), min(round), max(round) FROM records"
    ).fetchone()
    hashes = dict(db.execute("SELECT seq, hash FROM records WHERE seq IN (?, ?)", (first, last)))
    extent = (first, last, hashes[first], hashes[last], first_round, last_round)
    return Segment(name, *extent, sha256)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def altered(folder: Path, segments: tuple[Segment, ...]) -> Iterator[Segment]:
    """The segments that exist but were changed since they were closed."""
    for segment in segments:
        if not absent(folder, segment) and not is_intact(folder, segment):
            yield segment


@contextmanager
def segment_opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a closed segment for reading; creates no files."""
    address = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
    with closing(sqlite3.connect(address, uri=True, isolation_level=None)) as db:
        db.text_factory = lambda stored: stored.decode(errors="replace")
        yield db
