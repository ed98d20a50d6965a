"""What this site decided, and why: one SQLite file that survives any crash.

Four tables.  `memory` holds the few values a restart needs.  `records` is the site's history; each
row carries the hash of the one before, so an edited, dropped or swapped row is noticed.  `heads`
has signatures of some of these hashes, so that nobody without the key can write a history anew.
`newest` names the last record, so that one cut off at the end is missed.  A change of memory and
its record are one transaction: a round never advances unrecorded, and nothing that a peer may see
leaves before `append` has returned.

The journal stores what it is given and knows nothing about rounds.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightyear_node.errors import DiskFull, JournalCorrupt, StoreError
from lightyear_node.records import Digest, SignedHead

Plain = Mapping[str, Any]
Sign = Callable[[int, Digest], SignedHead]
"""Signs the head of a journal: the number of its newest record, and its hash."""
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
_RESTORE = "restore it from a backup, or move the state directory away to start anew"


@dataclass(frozen=True, slots=True)
class Record:
    seq: int
    wall_ns: int
    lamport: int
    round: int
    kind: str
    body: Plain
    hash: str


@dataclass(frozen=True, slots=True)
class Row:
    """One record as it stands in a copy of the journal, which anybody may have altered."""

    seq: Any
    wall_ns: Any
    lamport: Any
    round: Any
    kind: Any
    body: Any
    """The text of the body, not what it says."""
    hash: Any

    def hash_after(self, before: str) -> str | None:
        """What its hash has to be; None if it is not even made of numbers and words."""
        numbers = (self.seq, self.wall_ns, self.lamport, self.round)
        words = (self.kind, self.body)
        if not all(type(one) is int for one in numbers):
            return None
        if not all(isinstance(one, str) for one in words):
            return None
        front = canonical([*numbers, self.kind])[:-1]
        return _hash(before, f"{front},{self.body}]")

    def plain_body(self) -> Plain:
        """What the body says; nothing, where it has been made unreadable."""
        try:
            found = json.loads(self.body)
        except (TypeError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


class Journal:
    def __init__(self, path: Path) -> None:
        self.path = path
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
            self._db.execute("BEGIN")  # all of one moment, should somebody else be writing
            last = self._db.execute(
                "SELECT seq, hash, lamport FROM records ORDER BY seq DESC LIMIT 1"
            ).fetchone()
            newest = self._db.execute("SELECT seq, hash FROM newest").fetchone()
            head = self._db.execute("SELECT * FROM heads ORDER BY seq DESC LIMIT 1").fetchone()
            self._db.execute("COMMIT")
            self.signed_head = (
                SignedHead(head[0], head[1], bytes.fromhex(head[2])) if head else None
            )
        except sqlite3.Error as problem:
            self._db.close()
            raise _trouble(path, "opened", problem) from problem
        except (ValueError, TypeError) as problem:
            self._db.close()
            raise _corrupt(path, problem) from problem
        self._seq: int = last[0] if last else 0
        self._hash: str = last[1] if last else FIRST_HASH
        self.lamport: int = last[2] if last else 0
        if newest is not None and newest != (self._seq, self._hash):
            # The two are written together: this is no crash, and going on would cover it up.
            self._db.close()
            raise JournalCorrupt(
                f"{path}: its last record was number {newest[0]}, but it ends at {self._seq}:"
                " it was altered or cut short",
                hint=f"`lightyear-node audit verify` says where; {_RESTORE}",
            )

    def close(self) -> None:
        self._db.close()

    @property
    def head(self) -> str:
        """The newest record's hash, which stands for the whole history."""
        return str(self._hash)

    @property
    def length(self) -> int:
        """The newest record's number."""
        return self._seq

    def memory(self) -> dict[str, Any]:
        try:
            rows = self._db.execute("SELECT key, value FROM memory")
            return {key: json.loads(value) for key, value in rows}
        except (sqlite3.Error, ValueError) as problem:
            raise _corrupt(self.path, problem) from problem

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
        """Record one event and change memory with it; both are durable when this returns.

        With `sign`, so is the signature of the history up to and including this record.
        """
        record = _chained(self._seq + 1, wall_ns, lamport, round, kind, body, self._hash)
        head = sign(record.seq, Digest(record.hash)) if sign else None
        with self._transaction():
            self._db.execute(
                "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?)",
                (record.seq, wall_ns, lamport, round, kind, canonical(body), record.hash),
            )
            for key, value in (remember or {}).items():
                self._db.execute(
                    "INSERT OR REPLACE INTO memory VALUES (?, ?)", (key, canonical(value))
                )
            self._db.execute(
                "INSERT OR REPLACE INTO newest VALUES (1, ?, ?)", (record.seq, record.hash)
            )
            if head is not None:
                self._db.execute(
                    "INSERT INTO heads VALUES (?, ?, ?)",
                    (head.seq, head.hash, head.signature.hex()),
                )
        self.signed_head = head or self.signed_head
        self._seq, self._hash, self.lamport = record.seq, record.hash, lamport
        return record

    def records(self, kind: str | None = None, *, since_round: int = 0) -> Iterator[Record]:
        wanted = "WHERE round >= ?" + (" AND kind = ?" if kind else "")
        values = (since_round, kind) if kind else (since_round,)
        for row in self._db.execute(f"SELECT * FROM records {wanted} ORDER BY seq", values):
            seq, wall_ns, lamport, round, recorded, body, digest = row
            yield Record(seq, wall_ns, lamport, round, recorded, json.loads(body), digest)

    def hash_of(self, seq: int) -> str | None:
        found = self._db.execute("SELECT hash FROM records WHERE seq = ?", (seq,)).fetchone()
        return str(found[0]) if found else None

    def first_bad_record(self) -> int | None:
        """The first row whose chain does not hold, or None when the whole history is sound."""
        rows = (Row(*row) for row in self._db.execute("SELECT * FROM records ORDER BY seq"))
        return next((row.seq for row in unchained(rows)), None)

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
            raise _trouble(self.path, "written", problem) from problem


class Copy:
    """A journal at one moment, read as it stands and not as it should be."""

    before = FIRST_HASH
    first_seq = 1
    site = federation = None
    """Both are in its records."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.memory: Mapping[str, str] = dict(db.execute("SELECT key, value FROM memory"))
        self.heads: Mapping[int, tuple[Any, Any]] = {}
        """By the record's number its hash and the signature."""
        self.newest: tuple[Any, Any] | None = None
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
        # Journals of earlier versions have neither of these.
        if "heads" in tables:
            rows = db.execute("SELECT seq, hash, signature FROM heads ORDER BY seq")
            self.heads = {seq: (hash, signature) for seq, hash, signature in rows}
        if "newest" in tables:
            self.newest = db.execute("SELECT seq, hash FROM newest").fetchone()

    def rows(self, kind: str | None = None, *, round: int | None = None) -> Iterator[Row]:
        asked = {"kind": kind, "round": round}
        values = {name: value for name, value in asked.items() if value is not None}
        wanted = " AND ".join(f"{name} = :{name}" for name in values) or "TRUE"
        for row in self._db.execute(f"SELECT * FROM records WHERE {wanted} ORDER BY seq", values):
            yield Row(*row)

    def hash_of(self, seq: int) -> str | None:
        found = self._db.execute("SELECT hash FROM records WHERE seq = ?", (seq,)).fetchone()
        return str(found[0]) if found else None


@contextmanager
def reading(path: Path, *, thoroughly: bool = False) -> Iterator[Copy]:
    """A journal that may be in use, of which nothing is changed, not even the files beside it.

    `thoroughly` also looks for damage to the file that no query would meet.
    """
    # A reader of a journal that nobody has open would leave -wal and -shm files behind.
    in_use = path.with_name(path.name + "-wal").exists()
    address = f"{path.absolute().as_uri()}?mode=ro" + ("" if in_use else "&immutable=1")
    try:
        with closing(sqlite3.connect(address, uri=True, isolation_level=None)) as db:
            # What is no text is not ours either, and its hash will say so.
            db.text_factory = lambda stored: stored.decode(errors="replace")
            db.execute("BEGIN")  # from here on all queries see the same moment
            if thoroughly:
                sound = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
                if sound != "ok":
                    raise sqlite3.DatabaseError(sound)
            yield Copy(db)
    except sqlite3.Error as problem:
        raise _corrupt(path, problem) from problem


def peek(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a journal remembers, and its newest `start`; both empty where there is no journal."""
    if not path.exists():
        return {}, {}
    try:
        with reading(path) as copy:
            memory = {key: json.loads(value) for key, value in copy.memory.items()}
            starts = deque(copy.rows("start"), maxlen=1)
            return memory, json.loads(starts[0].body) if starts else {}
    except (ValueError, TypeError) as problem:
        raise _corrupt(path, problem) from problem


def unchained(
    rows: Iterable[Row], before: str = FIRST_HASH, expected_seq: int = 1
) -> Iterator[Row]:
    """The rows that do not follow, by number and hash, from the one in front of them."""
    for row in rows:
        if row.seq != expected_seq or row.hash != row.hash_after(before):
            yield row
        before, expected_seq = row.hash, row.seq + 1


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


def canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _chained(
    seq: int, wall_ns: int, lamport: int, round: int, kind: str, body: Plain, before: str
) -> Record:
    content = canonical([seq, wall_ns, lamport, round, kind, body])
    return Record(seq, wall_ns, lamport, round, kind, body, _hash(before, content))


def _hash(before: str, content: str) -> str:
    # What somebody has altered may be no text that UTF-8 knows; it then fits no hash.
    return hashlib.sha256(f"{before}{content}".encode(errors="surrogatepass")).hexdigest()
