"""Reads a journal without changing it, and verifies it before it is continued.

Nothing here writes, not even to SQLite's auxiliary files: a damaged journal is left as found.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lightyear_node.errors import JournalCorrupt, StoreError, TooManyFiles
from lightyear_node.storage.file_descriptors import none_left
from lightyear_node.storage.hash_chain import (
    FIRST_HASH,
    MEMORY_DIGEST,
    StoredRecord,
    broken_links,
    covers_memory,
)
from lightyear_node.storage.high_water_mark import HighWaterMark, read_mark
from lightyear_node.storage.journal_segments import (
    MEMORY_KEY,
    Segment,
    absent,
    altered,
    end_of,
    is_intact,
    present,
    segment_opened,
    segments_in,
)
from lightyear_node.types import SignedHead

_COLUMNS = {
    "memory": ("key", "value"),
    "records": ("seq", "wall_ns", "lamport", "round", "kind", "body", "hash"),
    "heads": ("seq", "hash", "signature"),
    "newest": ("one", "seq", "hash"),
}
_INDEX = "records_by_kind"
_READING = (sqlite3.Error, ValueError, TypeError, KeyError, RecursionError, OverflowError)
"""Exceptions that reading a damaged file can raise."""


class JournalSnapshot:
    """A journal at one moment, not verified.

    Includes the closed segments, back to the first missing one.
    """

    def __init__(
        self, db: sqlite3.Connection, folder: Path, *, mark: HighWaterMark | None, live_only: bool
    ) -> None:
        self._db = db
        self._folder = folder
        self.mark = mark
        """The newest committed record according to the high-water mark."""
        self.tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
        self.memory: Mapping[str, str] = {}
        self._live_heads: Mapping[int, tuple[Any, Any]] = {}
        self.newest: tuple[Any, Any] | None = None
        if self.tables:  # none if the first start was interrupted
            self.memory = dict(db.execute("SELECT key, value FROM memory"))
        # Earlier versions had neither table.
        if "heads" in self.tables:
            self._live_heads = _heads_in(db)
        if "newest" in self.tables:
            self.newest = db.execute("SELECT seq, hash FROM newest").fetchone()
        self.closed = segments_in(self.memory)
        self._here = () if live_only else present(folder, self.closed)
        before = self.closed[: len(self.closed) - len(self._here)]
        self.absent = tuple(one.file for one in before)
        """Segments that are not read: archived, or excluded by `live_only`."""
        last, self.before = end_of(before)
        self.first_seq = last + 1
        begun = _parsed(self.memory.get("begun")) if before else {}
        self.site, self.federation = begun.get("site"), begun.get("federation")
        """None if the first record is present: the records have them then."""

    @cached_property
    def heads(self) -> Mapping[int, tuple[Any, Any]]:
        """Hash and signature by record number."""
        found: dict[int, tuple[Any, Any]] = {}
        for segment in self._here:
            with self._opened(segment) as db:
                found.update(_heads_in(db))
        return {**found, **self._live_heads}

    @cached_property
    def altered(self) -> tuple[str, ...]:
        """Closed segments that were changed since they were closed."""
        return tuple(one.file for one in altered(self._folder, self._here))

    def rows(self, kind: str | None = None, *, round: int | None = None) -> Iterator[StoredRecord]:
        for segment in self._here:
            if round is None or segment.first_round <= round <= segment.last_round:
                with self._opened(segment) as db:
                    yield from rows_in(db, kind, round)
        yield from rows_in(self._db, kind, round)

    def last(self, kind: str) -> StoredRecord | None:
        """The newest record of this kind."""
        for row in rows_in(self._db, kind, newest_first=True):
            return row
        for segment in reversed(self._here):
            with self._opened(segment) as db:
                for row in rows_in(db, kind, newest_first=True):
                    return row
        return None

    def hash_of(self, seq: int) -> str | None:
        found = self._db.execute("SELECT hash FROM records WHERE seq = ?", (seq,)).fetchone()
        segment = next((one for one in self._here if one.first <= seq <= one.last), None)
        if segment is not None:
            with self._opened(segment) as db:
                found = db.execute("SELECT hash FROM records WHERE seq = ?", (seq,)).fetchone()
        return str(found[0]) if found else None

    def columns(self, table: str) -> tuple[str, ...]:
        return tuple(row[1] for row in self._db.execute(f"PRAGMA table_info({table})"))

    @contextmanager
    def _opened(self, segment: Segment) -> Iterator[sqlite3.Connection]:
        path = self._folder / segment.file
        try:
            with segment_opened(path) as db:
                yield db
        except sqlite3.Error as problem:
            raise unreadable(path, problem) from problem


@contextmanager
def reading(
    path: Path, *, thoroughly: bool = False, live_only: bool = False
) -> Iterator[JournalSnapshot]:
    """Open a journal, possibly in use, for reading; no file is changed or created.

    `thoroughly` also checks the integrity of the database file; `live_only` leaves out the closed
    segments.
    """
    mark = read_mark(path)  # first, so it is not newer than the records
    # If no process has the journal open, a normal reader would leave -wal and -shm files.
    in_use = path.with_name(path.name + "-wal").exists()
    address = f"{path.absolute().as_uri()}?mode=ro" + ("" if in_use else "&immutable=1")
    try:
        with closing(sqlite3.connect(address, uri=True, isolation_level=None)) as db:
            # Invalid UTF-8 is not ours; its hash will not match.
            db.text_factory = lambda stored: stored.decode(errors="replace")
            db.execute("BEGIN")  # from here on all queries see the same moment
            if thoroughly:
                result = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
                if result != "ok":
                    raise sqlite3.DatabaseError(result)
            try:
                snapshot = JournalSnapshot(db, path.parent, mark=mark, live_only=live_only)
            except (ValueError, TypeError, RecursionError) as problem:
                raise damaged(path, problem) from problem
            yield snapshot
    except sqlite3.Error as problem:
        raise unreadable(path, problem) from problem


def peek(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The memory and the newest `start` record; both empty if there is no journal."""
    if not path.exists():
        return {}, {}
    try:
        with reading(path) as snapshot:
            texts = {key: text for key, text in snapshot.memory.items() if key != MEMORY_KEY}
            memory = {key: json.loads(text) for key, text in texts.items()}
            start = snapshot.last("start")
            begun = json.loads(start.body) if start is not None else {}
            begun.pop(MEMORY_DIGEST, None)
            return memory, begun
    except (ValueError, TypeError, AttributeError) as problem:
        raise damaged(path, problem) from problem


@dataclass(frozen=True, slots=True)
class VerifiedEnd:
    """The verified end of a journal, from which it can be continued."""

    seq: int = 0
    hash: str = FIRST_HASH
    signed_head: SignedHead | None = None
    segments: tuple[Segment, ...] = ()
    memory: Mapping[str, str] = field(default_factory=dict)


def verified_end(path: Path, *, recovered: bool = False) -> VerifiedEnd:
    """Verify what continuing a journal relies on; raises JournalCorrupt.

    That is the database file, the chain of the live records, their signatures, the table `newest`,
    the memory and, unless newer records are known to be lost (`recovered`), the high-water mark.
    Closed segments are not checked.
    """
    mark = None if recovered else read_mark(path)
    try:
        empty = not path.exists() or path.stat().st_size == 0
    except OSError as problem:
        raise damaged(path, problem.strerror) from problem
    if empty:
        log = path.with_name(path.name + "-wal")
        stray = log.exists() and log.stat().st_size > 0
        if mark is not None or (stray and not recovered):
            raise _records_lost(path, mark.seq if mark else None, 0)
        return VerifiedEnd()
    try:
        with reading(path, thoroughly=True, live_only=True) as snapshot:
            return _verified(path, snapshot, mark)
    except _READING as problem:
        raise unreadable(path, problem) from problem


def _verified(path: Path, snapshot: JournalSnapshot, mark: HighWaterMark | None) -> VerifiedEnd:
    _check_tables(path, snapshot)
    if not snapshot.tables and mark is not None:
        raise _records_lost(path, mark.seq, 0)
    if not snapshot.tables:
        return VerifiedEnd()
    last = _last_live(path, snapshot)
    seq, hash = (last.seq, last.hash) if last else (snapshot.first_seq - 1, snapshot.before)
    if snapshot.newest is not None and snapshot.newest != (seq, hash):
        # Both are written in one transaction, so this was not a crash.
        raise _altered(
            path, f"its last record was number {snapshot.newest[0]}, but it ends at {seq}"
        )
    if mark is not None and mark.seq > seq:
        raise _records_lost(path, mark.seq, seq)
    if (
        mark is not None
        and mark.seq >= snapshot.first_seq
        and snapshot.hash_of(mark.seq) != mark.hash
    ):
        raise _altered(path, f"record {mark.seq} is not the one that was committed")
    if last is not None and covers_memory(last, snapshot.memory) is False:
        raise _altered(path, f"what it remembers is not what record {seq} left")
    head = _newest_head(path, snapshot)
    return VerifiedEnd(seq, hash, head, snapshot.closed, snapshot.memory)


def _check_tables(path: Path, snapshot: JournalSnapshot) -> None:
    """Check tables and columns: a table with a damaged name must not be created again."""
    ours = {name for name in snapshot.tables if not name.startswith("sqlite_")}
    if not snapshot.tables:
        return
    optional = {"heads", "newest"}  # missing in earlier versions
    missing = _COLUMNS.keys() - ours
    known = ours <= {*_COLUMNS, _INDEX} and _INDEX in ours and missing in (set(), optional)
    if not known or any(
        snapshot.columns(name) != _COLUMNS[name] for name in _COLUMNS.keys() & ours
    ):
        raise damaged(path, "its tables are not those of a journal")


def _last_live(path: Path, snapshot: JournalSnapshot) -> StoredRecord | None:
    last: StoredRecord | None = None
    for last, bad in _chain_checked(snapshot):
        if bad:
            raise _altered(path, f"record {last.seq!r} does not follow from the one before it")
    if last is None and (snapshot.closed or snapshot.newest is not None):
        raise _altered(path, "its records are missing")
    return last


def _chain_checked(snapshot: JournalSnapshot) -> Iterator[tuple[StoredRecord, bool]]:
    before, expected = snapshot.before, snapshot.first_seq
    for row in snapshot.rows():
        yield row, any(broken_links([row], before, expected))
        before, expected = row.hash, row.seq + 1


def _newest_head(path: Path, snapshot: JournalSnapshot) -> SignedHead | None:
    for seq, (hash, _) in snapshot.heads.items():
        if hash is None or hash != snapshot.hash_of(seq):
            raise _altered(path, f"the signature of record {seq} belongs to another one")
    if not snapshot.heads:
        return _closed_head(path, snapshot)
    seq = max(snapshot.heads)
    hash, signature = snapshot.heads[seq]
    return SignedHead(seq, hash, bytes.fromhex(signature))


def _closed_head(path: Path, snapshot: JournalSnapshot) -> SignedHead | None:
    """The newest signature if no live record has one: the last segment ends with it."""
    if not snapshot.closed:
        return None
    if absent(path.parent, snapshot.closed[-1]):
        return None
    with closed_segment(path.parent, snapshot.closed[-1]) as db:
        found = db.execute("SELECT * FROM heads ORDER BY seq DESC LIMIT 1").fetchone()
    return SignedHead(found[0], found[1], bytes.fromhex(found[2])) if found else None


@contextmanager
def closed_segment(folder: Path, segment: Segment) -> Iterator[sqlite3.Connection]:
    """Open a segment after checking its hash, so the chain covers what is read."""
    path = folder / segment.file
    if not is_intact(folder, segment):
        raise damaged(path, "this closed segment was changed")
    try:
        with segment_opened(path) as db:
            yield db
    except sqlite3.Error as problem:
        raise unreadable(path, problem) from problem


def rows_in(
    db: sqlite3.Connection,
    kind: str | None = None,
    round: int | None = None,
    *,
    newest_first: bool = False,
) -> Iterator[StoredRecord]:
    asked = {"kind": kind, "round": round}
    values = {name: value for name, value in asked.items() if value is not None}
    wanted = " AND ".join(f"{name} = :{name}" for name in values) or "TRUE"
    order = "DESC" if newest_first else "ASC"
    for row in db.execute(f"SELECT * FROM records WHERE {wanted} ORDER BY seq {order}", values):
        yield StoredRecord(*row)


def _heads_in(db: sqlite3.Connection) -> dict[int, tuple[Any, Any]]:
    rows = db.execute("SELECT seq, hash, signature FROM heads ORDER BY seq")
    return {seq: (hash, signature) for seq, hash, signature in rows}


def _parsed(text: Any) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def unreadable(path: Path, problem: BaseException) -> StoreError:
    """The error for an unreadable journal: damage, unless there is no file descriptor left."""
    code = getattr(problem, "sqlite_errorcode", None) or 0
    if code & 0xFF == sqlite3.SQLITE_CANTOPEN and none_left():
        return TooManyFiles(f"{path}: the journal cannot be opened: {problem}")
    return damaged(path, problem)


def damaged(path: Path, problem: object) -> JournalCorrupt:
    folder = path.parent
    return JournalCorrupt(
        f"{path}: the journal cannot be read: {' '.join(str(problem).split())}",
        hint="restore the whole state directory from a backup, or move it away to start over:"
        f" mv {folder} {folder}.damaged",
    )


def _altered(path: Path, about: str) -> JournalCorrupt:
    return JournalCorrupt(
        f"{path}: {about}: it was altered or cut short",
        hint="`lightyear-node audit verify` says where; restore the whole state directory from a"
        " backup, or move it away to start over",
    )


def _records_lost(path: Path, committed: int | None, seq: int) -> JournalCorrupt:
    written = "records were" if committed is None else f"{committed} records were"
    return JournalCorrupt(
        f"{path}: {written} written, but it ends at {seq}: the file or its log ({path.name}-wal)"
        " is damaged or missing",
        hint="put the missing file back; if there is none, `lightyear-node start --recovered` asks"
        " the other sites what this one has forgotten and goes on",
    )
