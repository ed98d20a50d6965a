"""The journal: what this site decided and why, in a SQLite file that survives crashes.

It has four tables.  `memory` holds the values that a restart needs.  `records` is the history; each
row's hash covers the previous hash and the digest of the memory, so an edited, deleted or swapped
row is detected.  `heads` has signatures of some of these hashes, so the history cannot be rewritten
without the key.  `newest` names the last record, so truncation is detected; so does the file of
`high_water_mark`.  A change of memory and its record are one transaction, durable when `append`
returns.  Only after that may peers see its consequences.

Old records move to closed segments (`journal_segments`).  A journal is verified before it is
opened: the file, the chain of the live records, the memory.  Damage found later stops all appends.

The journal stores plain values; `round_journal` gives them meaning.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightyear_node.errors import DiskFull, JournalCorrupt, Shortage, StoreError
from lightyear_node.storage.file_descriptors import shortage
from lightyear_node.storage.hash_chain import (
    FIRST_HASH,
    MEMORY_DIGEST,
    MemoryDigest,
    Plain,
    Record,
    canonical,
    next_record,
)
from lightyear_node.storage.high_water_mark import HighWaterMark, MarkFile
from lightyear_node.storage.journal_reader import (
    VerifiedEnd,
    closed_segment,
    damaged,
    unreadable,
    verified_end,
)
from lightyear_node.storage.journal_segments import (
    MEMORY_KEY,
    SEGMENT_BYTES,
    Segment,
    absent,
    close_segment,
    end_of,
    segment_opened,
)
from lightyear_node.types import Digest, SignedHead

Sign = Callable[[int, Digest], SignedHead]
"""Signs the head of a journal: number and hash of its newest record."""

_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
# SHMSIZE: SQLite could not enlarge the index of its write-ahead log.
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
_RECENT_SEGMENTS = 2
_SPARE_SEGMENTS = 4
"""A live file with unused pages of more than this many segments is compacted when opened."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS memory (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS records (
    seq INTEGER PRIMARY KEY,
    wall_ns INTEGER NOT NULL,
    lamport INTEGER NOT NULL,
    round INTEGER NOT NULL,
    kind TEXT NOT NULL,
    body TEXT NOT NULL,
    hash TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS records_by_kind ON records (kind, round);
CREATE TABLE IF NOT EXISTS heads (
    seq INTEGER PRIMARY KEY,
    hash TEXT NOT NULL,
    signature TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS newest (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    seq INTEGER NOT NULL,
    hash TEXT NOT NULL
);
"""


class Journal:
    """`recovered`: the operator states that newer records are lost."""

    def __init__(self, path: Path, *, recovered: bool = False) -> None:
        self.path = path
        self.broken: str | None = None
        """Damage found while the journal was open; nothing is appended after that."""
        verified = verified_end(path, recovered=recovered)
        with ExitStack() as undo:
            try:
                self._db = sqlite3.connect(path, isolation_level=None)
                undo.callback(self._db.close)
                self._db.text_factory = lambda stored: stored.decode(errors="replace")
                self._prepare()
            except sqlite3.Error as problem:
                raise _store_error(path, "opened", problem) from problem
            self._mark = MarkFile(path)
            undo.pop_all()
        self._continue_from(verified)
        if recovered:
            self._mark.write(HighWaterMark(self._seq, self._hash))
        self._inode = path.stat().st_ino
        self._appended = False

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        # FULL: a completed commit survives a power cut.
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(_SCHEMA)
        if self._size("freelist_count") > _SPARE_SEGMENTS * SEGMENT_BYTES:
            try:
                self._db.execute("VACUUM")
            except sqlite3.Error as problem:
                if problem.sqlite_errorcode not in _FULL:
                    raise

    def _continue_from(self, verified: VerifiedEnd) -> None:
        self._seq, self._hash = verified.seq, verified.hash
        self.signed_head = verified.signed_head
        self._segments = verified.segments
        self._digest = MemoryDigest(verified.memory)

    def close(self) -> None:
        self._db.close()
        self._mark.close()

    @property
    def head(self) -> str:
        """The newest record's hash, which covers the whole history."""
        return self._hash

    @property
    def length(self) -> int:
        """The newest record's number."""
        return self._seq

    @property
    def segmented(self) -> bool:
        """Whether older records are in closed segments."""
        return bool(self._segments)

    def memory(self) -> dict[str, Any]:
        try:
            rows = self._db.execute("SELECT key, value FROM memory WHERE key != ?", (MEMORY_KEY,))
            return {key: json.loads(value) for key, value in rows}
        except (sqlite3.Error, ValueError) as problem:
            raise self._mark_broken(damaged(self.path, problem)) from problem

    def append(
        self,
        kind: str,
        body: Plain,
        *,
        wall_ns: int,
        lamport: int,
        round: int,
        remember: Plain | None = None,
        sign: Sign | None = None,
    ) -> Record:
        """Append a record and change the memory; both are durable when this returns.

        With `sign`, the history including this record is signed in the same transaction.
        """
        self._refuse_broken()
        texts = {key: canonical(value) for key, value in (remember or {}).items()}
        closed = self._close_segment()
        if closed is not None:
            texts[MEMORY_KEY] = canonical([asdict(one) for one in (*self._segments, closed)])
        digest = self._digest.changed(texts)
        covered = {**body, MEMORY_DIGEST: digest.hex()}
        record = next_record(self._seq + 1, wall_ns, lamport, round, kind, covered, self._hash)
        head = sign(record.seq, Digest(record.hash)) if sign else None
        with self._transaction():
            if closed is not None:
                for table in ("records", "heads"):
                    self._db.execute(f"DELETE FROM {table} WHERE seq <= ?", (closed.last,))
            self._db.execute(
                "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?)",
                (record.seq, wall_ns, lamport, round, kind, canonical(covered), record.hash),
            )
            for key, text in texts.items():
                self._db.execute("INSERT OR REPLACE INTO memory VALUES (?, ?)", (key, text))
            self._db.execute(
                "INSERT OR REPLACE INTO newest VALUES (1, ?, ?)", (record.seq, record.hash)
            )
            if head is not None:
                self._db.execute(
                    "INSERT INTO heads VALUES (?, ?, ?)",
                    (head.seq, head.hash, head.signature.hex()),
                )
        self._mark.write(HighWaterMark(record.seq, record.hash))
        self._digest, self._appended = digest, True
        self._segments += (closed,) if closed is not None else ()
        self.signed_head = head or self.signed_head
        self._seq, self._hash = record.seq, record.hash
        return replace(record, body=body)

    def recent(self, since_round: int) -> Iterator[Record]:
        """Records in the newest closed segments and the live file, in order."""
        for segment in self._segments[-_RECENT_SEGMENTS:]:
            if segment.last_round >= since_round and not absent(self.path.parent, segment):
                with closed_segment(self.path.parent, segment) as db:
                    yield from _records(db, since_round)
        yield from _records(self._db, since_round)

    def hash_of(self, seq: int) -> str | None:
        """The hash of a record; None if it does not exist, or is in an archived segment."""
        segment = next((one for one in self._segments if one.first <= seq <= one.last), None)
        if segment is None:
            return self._look_up(self._db, seq)
        known = {segment.first: segment.first_hash, segment.last: segment.last_hash}
        if seq in known or absent(self.path.parent, segment):
            return known.get(seq)
        # The file is not hashed: peers decide how often this is called.
        path = self.path.with_name(segment.file)
        try:
            with segment_opened(path) as db:
                return self._look_up(db, seq)
        except sqlite3.Error as problem:
            raise unreadable(path, problem) from problem

    def _look_up(self, db: sqlite3.Connection, seq: int) -> str | None:
        try:
            found = db.execute("SELECT hash FROM records WHERE seq = ?", (seq,)).fetchone()
        except sqlite3.Error as problem:
            raise self._mark_broken(unreadable(self.path, problem)) from problem
        return str(found[0]) if found else None

    # Segments.

    def _close_segment(self) -> Segment | None:
        """Close a segment if the live file is large, at a signed record or at the first append."""
        signed = self.signed_head is not None and self.signed_head.seq == self._seq
        if self._seq == end_of(self._segments)[0] or (self._appended and not signed):
            return None
        try:
            if self._size("page_count") - self._size("freelist_count") < SEGMENT_BYTES:
                return None
            return close_segment(self._db, self.path.parent, self._segments)
        except sqlite3.Error as problem:
            error = _store_error(self.path, "closed", problem)
            if not isinstance(error, Shortage):
                raise self._mark_broken(error) from problem
        except OSError as problem:
            if shortage(self.path, problem) is None:
                raise StoreError(
                    f"{self.path}: a segment cannot be written: {problem.strerror}",
                    hint="check the disk, and the owner and mode of the state directory",
                ) from problem
        return None  # without space the live file keeps growing

    def _size(self, pages: str) -> int:
        """`page_count` or `freelist_count`, in bytes."""
        [(count,)], [(size,)] = (self._db.execute(f"PRAGMA {it}") for it in (pages, "page_size"))
        return int(count) * int(size)

    # Damage.

    def _refuse_broken(self) -> None:
        if self.broken is not None:
            raise JournalCorrupt(self.broken, hint=damaged(self.path, "").hint)

    def _mark_broken(self, problem: StoreError) -> StoreError:
        if isinstance(problem, JournalCorrupt):
            self.broken = self.broken or str(problem)
        return problem

    def _check_end(self) -> None:
        """Check that the file and its newest record are still the ones we wrote."""
        try:
            same_file = self.path.stat().st_ino == self._inode
        except OSError:
            same_file = False
        if not same_file:
            raise self._mark_broken(
                damaged(self.path, "the file was moved or replaced while in use")
            )
        newest = self._db.execute(
            "SELECT seq, hash FROM records ORDER BY seq DESC LIMIT 1"
        ).fetchone()
        if (newest or (0, FIRST_HASH)) != (self._seq, self._hash):
            raise self._mark_broken(
                damaged(self.path, "its newest record was changed while in use")
            )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._check_end()
                yield
                self._db.execute("COMMIT")
            except BaseException:
                # After some failures SQLite has rolled back itself.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.Error as problem:
            raise self._mark_broken(_store_error(self.path, "written", problem)) from problem


def _records(db: sqlite3.Connection, since_round: int) -> Iterator[Record]:
    wanted = "SELECT * FROM records WHERE round >= ? ORDER BY seq"
    for seq, wall_ns, lamport, round, kind, body, digest in db.execute(wanted, (since_round,)):
        content = json.loads(body)
        content.pop(MEMORY_DIGEST, None)
        yield Record(seq, wall_ns, lamport, round, kind, content, digest)


def _store_error(path: Path, what: str, problem: sqlite3.Error) -> StoreError:
    """Classify an error: a shortage is retried, damage needs a backup, others an operator."""
    code = getattr(problem, "sqlite_errorcode", None) or 0
    about = f"{path}: the journal cannot be {what}: {problem}"
    if code in _FULL:
        return DiskFull(about)
    found = unreadable(path, problem)
    if code & 0xFF in _CORRUPT or isinstance(found, Shortage):
        return found
    return StoreError(
        about,
        hint="check the disk, and the owner and mode of the state directory; nothing was announced",
    )
