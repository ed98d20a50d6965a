"""What this site decided, and why: one SQLite file that survives any crash.

Two tables.  `memory` holds the few values a restart needs.  `records` is the site's history; each
row carries the hash of the one before, so an edited, dropped or swapped row is noticed.  A change
of memory and its record are one transaction: a round never advances unrecorded, and nothing that a
peer may see leaves before `append` has returned.

The journal stores what it is given and knows nothing about rounds.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightyear_node.errors import DiskFull, JournalCorrupt, StoreError

Plain = Mapping[str, Any]
FIRST_HASH = "0" * 64

_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
# Beside the plain word for it: SQLite could not make the index of its log any larger.
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)

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
"""


@dataclass(frozen=True, slots=True)
class Record:
    seq: int
    wall_ns: int
    lamport: int
    round: int
    kind: str
    body: Plain
    hash: str


class Journal:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
        except sqlite3.Error as problem:
            raise _trouble(path, "opened", problem) from problem
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            # FULL: a commit that returned is on the disk, also after a power cut.
            self._db.execute("PRAGMA synchronous=FULL")
            sound = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
            if sound != "ok":
                raise _corrupt(path, sound)
            self._db.executescript(_SCHEMA)
            last = self._db.execute(
                "SELECT seq, hash, lamport FROM records ORDER BY seq DESC LIMIT 1"
            ).fetchone()
        except sqlite3.Error as problem:
            self._db.close()
            raise _trouble(path, "opened", problem) from problem
        self._seq: int = last[0] if last else 0
        self._hash: str = last[1] if last else FIRST_HASH
        self.lamport: int = last[2] if last else 0

    def close(self) -> None:
        self._db.close()

    @property
    def head(self) -> str:
        """The newest record's hash, which stands for the whole history."""
        return str(self._hash)

    def memory(self) -> dict[str, Any]:
        try:
            rows = self._db.execute("SELECT key, value FROM memory")
            return {key: json.loads(value) for key, value in rows}
        except (sqlite3.Error, ValueError) as problem:
            raise _corrupt(self._path, problem) from problem

    def append(
        self,
        kind: str,
        body: Plain,
        *,
        wall_ns: int,
        lamport: int,
        round: int,
        remember: Plain | None = None,
    ) -> Record:
        """Record one event and change memory with it; both are durable when this returns."""
        record = _chained(self._seq + 1, wall_ns, lamport, round, kind, body, self._hash)
        with self._transaction():
            self._db.execute(
                "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?)",
                (record.seq, wall_ns, lamport, round, kind, _canonical(body), record.hash),
            )
            for key, value in (remember or {}).items():
                self._db.execute(
                    "INSERT OR REPLACE INTO memory VALUES (?, ?)", (key, _canonical(value))
                )
        self._seq, self._hash, self.lamport = record.seq, record.hash, lamport
        return record

    def records(self, kind: str | None = None, *, since_round: int = 0) -> Iterator[Record]:
        wanted = "WHERE round >= ?" + (" AND kind = ?" if kind else "")
        values = (since_round, kind) if kind else (since_round,)
        for row in self._db.execute(f"SELECT * FROM records {wanted} ORDER BY seq", values):
            seq, wall_ns, lamport, round, recorded, body, digest = row
            yield Record(seq, wall_ns, lamport, round, recorded, json.loads(body), digest)

    def first_bad_record(self) -> int | None:
        """The first row whose chain does not hold, or None when the whole history is sound."""
        before, expected_seq = FIRST_HASH, 1
        for record in self.records():
            again = _chained(
                expected_seq,
                record.wall_ns,
                record.lamport,
                record.round,
                record.kind,
                record.body,
                before,
            )
            if again != record:
                return record.seq
            before, expected_seq = record.hash, expected_seq + 1
        return None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                # After some failures SQLite has done so itself; after none is it left open.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.Error as problem:
            raise _trouble(self._path, "written", problem) from problem


def peek(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a journal remembers, and its newest `start`; of one that may be in use.

    Nothing is changed, not even the files beside it: both are empty where there is no journal.
    """
    if not path.exists():
        return {}, {}
    # A reader of a journal that nobody has open would leave -wal and -shm files behind.
    in_use = path.with_name(path.name + "-wal").exists()
    address = f"{path.absolute().as_uri()}?mode=ro" + ("" if in_use else "&immutable=1")
    try:
        with closing(sqlite3.connect(address, uri=True)) as db:
            memory = {key: json.loads(value) for key, value in db.execute("SELECT * FROM memory")}
            begun = db.execute(
                "SELECT body FROM records WHERE kind = 'start' ORDER BY seq DESC LIMIT 1"
            ).fetchone()
            start = json.loads(begun[0]) if begun else {}
    except (sqlite3.Error, ValueError) as problem:
        raise _corrupt(path, problem) from problem
    return memory, start


def _trouble(path: Path, what: str, problem: sqlite3.Error) -> StoreError:
    """Who must act: only a lack of space passes by itself, and only damage needs a backup."""
    code = getattr(problem, "sqlite_errorcode", None) or 0
    about = f"{path}: the journal cannot be {what}: {problem}"
    if code in _FULL:
        return DiskFull(about)
    if code & 0xFF in _CORRUPT:
        return _corrupt(path, problem)
    return StoreError(
        about,
        hint="check the disk, and the owner and mode of the state directory; nothing was announced",
    )


def _corrupt(path: Path, problem: object) -> JournalCorrupt:
    folder = path.parent
    return JournalCorrupt(
        f"{path}: the journal cannot be read: {problem}",
        hint="restore the whole state directory from a backup, or move it away to start anew:"
        f" mv {folder} {folder}.damaged",
    )


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _chained(
    seq: int, wall_ns: int, lamport: int, round: int, kind: str, body: Plain, before: str
) -> Record:
    content = _canonical([seq, wall_ns, lamport, round, kind, body])
    digest = hashlib.sha256(f"{before}{content}".encode()).hexdigest()
    return Record(seq, wall_ns, lamport, round, kind, body, digest)
