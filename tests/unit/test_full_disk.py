"""No space left: at every place that writes, the same step succeeds later, and nothing is lost."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.barrier import Memory
from lightyear_node.errors import DiskFull, JournalCorrupt, StoreError
from lightyear_node.home import State
from lightyear_node.journal import Journal
from lightyear_node.learner import Learner
from lightyear_node.ledger import Best, Ledger
from lightyear_node.records import Digest, Generation, Round
from lightyear_node.store import Store

from .test_ledger import FIRST, Book, decided
from .test_shelf import Room
from .test_store import CHUNKS, DIGEST, begin

# -- files ----------------------------------------------------------------------------------------


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_write_that_fails_is_a_store_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    incoming = begin(Store(tmp_path))

    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
    with pytest.raises(DiskFull, match="No space left"):
        incoming.write(CHUNKS[0])
    assert incoming.next_chunk == 0
    monkeypatch.setattr(os, "pwrite", failing(errno.EIO))
    with pytest.raises(StoreError) as caught:
        incoming.write(CHUNKS[0])
    assert not isinstance(caught.value, DiskFull), "a broken disk is not a full one"
    assert incoming.next_chunk == 0


def test_a_short_write_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    incoming = begin(store)
    actual = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, raw, at: actual(fd, raw[:70_000], at))
    for chunk in CHUNKS:
        incoming.write(chunk)
    incoming.finish()
    assert store.verify(DIGEST)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_what_could_not_be_synced_is_never_synced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The system forgets what it could not write: a second sync succeeds, and means nothing."""
    store = Store(tmp_path)
    incoming = begin(store)
    for chunk in CHUNKS:
        incoming.write(chunk)
    scratch = store.scratch_path()
    scratch.write_bytes(b"trained")
    monkeypatch.setattr(os, "fsync", failing(number))
    kind = DiskFull if number == errno.ENOSPC else StoreError
    for attempt in (incoming.finish, lambda: store.adopt(scratch)):
        with pytest.raises(StoreError) as caught:
            attempt()
        assert type(caught.value) is kind
    incoming.close()
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
    again = begin(store)
    assert again.next_chunk == 0
    again.close()


def test_what_is_here_by_name(tmp_path: Path) -> None:
    store = Store(tmp_path)
    scratch = store.scratch_path()
    scratch.write_bytes(b"ours")
    ours = store.adopt(scratch).digest
    incoming = begin(store)
    incoming.write(CHUNKS[0])
    assert (store.whole(), store.parts(), store.busy()) == ({ours}, {DIGEST}, {ours, DIGEST})
    store.discard(DIGEST)
    assert store.parts() == {DIGEST}, "what is arriving stays"
    incoming.close()
    store.discard(DIGEST)
    assert store.parts() == set()
    store.retain({ours})
    assert store.busy() == {ours}
    store.retain(set())
    assert store.busy() == set()
    assert store.whole() == set()


def test_what_a_killed_worker_left_is_cleared(tmp_path: Path) -> None:
    store = Store(tmp_path)
    mine, other = store.scratch_path(), store.scratch_path()
    for path in (mine, other):
        path.with_name(path.name + ".part").write_bytes(b"half")
    store.clear_scratch(mine)
    assert [path.name for path in tmp_path.iterdir()] == [other.name + ".part"]
    store.clear_scratch()
    assert not list(tmp_path.iterdir())


# -- the journal ----------------------------------------------------------------------------------


def append(journal: Journal, body: str) -> None:
    journal.append("event", {"body": body}, wall_ns=0, lamport=1, round=0, remember={"last": body})


def test_a_full_journal_is_told_as_such_and_works_again_later(tmp_path: Path) -> None:
    """SQLite's own error: the file may have no more pages."""
    journal = Journal(tmp_path / "journal.db")
    append(journal, "first")
    [(pages,)] = journal._db.execute("PRAGMA page_count")
    journal._db.execute(f"PRAGMA max_page_count = {pages}")
    for _ in range(3):
        with pytest.raises(DiskFull, match=r"journal.db.*full"):
            append(journal, "x" * 100_000)
        assert journal.memory() == {"last": "first"}
    journal._db.execute("PRAGMA max_page_count = 1000000")
    append(journal, "x" * 100_000)
    assert [record.seq for record in journal.records()] == [1, 2]
    assert journal.first_bad_record() is None


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (sqlite3.SQLITE_FULL, DiskFull),
        (sqlite3.SQLITE_IOERR_FSYNC, StoreError),
        (sqlite3.SQLITE_IOERR_WRITE, StoreError),
        (sqlite3.SQLITE_READONLY, StoreError),
        (sqlite3.SQLITE_CORRUPT, JournalCorrupt),
    ],
)
def test_a_failed_commit_leaves_no_transaction_open(
    tmp_path: Path, code: int, kind: type[StoreError]
) -> None:
    journal = Journal(tmp_path / "journal.db")
    append(journal, "first")
    actual = journal._db
    journal._db = Failing(actual, code)  # type: ignore[assignment]
    with pytest.raises(StoreError) as caught:
        append(journal, "second")
    assert type(caught.value) is kind
    journal._db = actual
    assert not actual.in_transaction
    append(journal, "third")
    assert [record.body["body"] for record in journal.records()] == ["first", "third"]
    assert journal.first_bad_record() is None


class Failing:
    """A connection whose commits fail."""

    def __init__(self, db: sqlite3.Connection, code: int) -> None:
        self._db = db
        self._code = code

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if statement == "COMMIT":
            problem = sqlite3.OperationalError("as the disk says")
            problem.sqlite_errorcode = self._code
            raise problem
        return self._db.execute(statement, *values)


def test_memory_that_is_no_longer_json_is_damage(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    journal = Journal(tmp_path / "state" / "journal.db")
    append(journal, "first")
    journal._db.execute("UPDATE memory SET value = '{'")
    with pytest.raises(JournalCorrupt, match="cannot be read") as caught:
        journal.memory()
    assert f"mv {tmp_path}/state {tmp_path}/state.damaged" in str(caught.value.hint)


# -- the ledger -----------------------------------------------------------------------------------


def test_what_could_not_be_recorded_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a heartbeat would announce what a crash could unsay."""
    book = Book(tmp_path / "journal.db")
    book.decide(0, FIRST)
    before = dict(vars(book.ledger))

    def full(*_: Any, **__: Any) -> None:
        raise DiskFull("full")

    monkeypatch.setattr(Journal, "append", full)
    memory = Memory(Generation(0), Round(1))
    for step in (
        lambda: book.ledger.decide(*decided(1), {}),
        lambda: book.ledger.commit(Round(0), Digest("n"), memory, {"loss": 0.1}),
        lambda: book.ledger.fall_back(Digest("m"), []),
        lambda: book.ledger.settings({}, certificate="c", agreement=Digest("a")),
        lambda: book.ledger.start(
            schema=Digest("s"), initial_model=Digest("i"), rule="other", about={}
        ),
    ):
        with pytest.raises(DiskFull):
            step()
        assert vars(book.ledger) == before
    monkeypatch.undo()
    room = Room(tmp_path / "room")
    offered, manifest = room.seal(0), room.ledger.manifest
    monkeypatch.setattr(Journal, "append", full)
    with pytest.raises(DiskFull):
        room.seal(1)
    assert (room.ledger.offered, room.ledger.manifest) == ([offered], manifest)


def test_the_last_models_and_the_best_are_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")

    def opened() -> Ledger:
        return Ledger(journal, wall_ns=lambda: 0, stamp=lambda: 1, models_kept=2)

    ledger = opened()
    ledger.models = [Digest("initial")]
    losses = [0.9, 0.2, 0.5, float("nan"), 0.3]
    for round, loss in enumerate(losses):
        memory = Memory(Generation(0), Round(round + 1))
        ledger.commit(Round(round), Digest(f"m{round}"), memory, {"loss": loss})
    assert ledger.models == ["m4", "m3"]
    assert ledger.best == Best(Digest("m1"), 1, 0.2)
    assert opened().kept_models == {"m4", "m3", "m1"}
    # A round that changed nothing leaves one model, once.
    ledger.commit(Round(5), Digest("m4"), Memory(Generation(0), Round(6)), {})
    assert ledger.models == ["m4", "m3"]
    ledger.fall_back(Digest("m3"), [Digest("m4")])
    again = opened()
    assert (again.model, again.best) == ("m3", ledger.best)
    [record] = journal.records("fallback")
    assert record.body == {"model": "m3", "damaged": ["m4"]}


# -- the worker's files ---------------------------------------------------------------------------


def leave_half(path: str) -> None:
    for name in (path, path + ".part"):
        Path(name).write_bytes(b"half")


class FullWorker:
    """Writes half of what it should, and finds the disk full."""

    def __init__(self, *leaving: str) -> None:
        self._leaving = leaving
        self.opened, self.stopped = 0, False

    async def open(self) -> dict[str, Any]:
        self.opened += 1
        return dict.fromkeys(
            ("device", "parameters", "train_samples", "val_samples", "head", "floor"), 0
        )

    async def stop(self) -> None:
        self.stopped = True

    async def call(self, job: str, **arguments: Any) -> dict[str, Any]:
        for name in self._leaving:
            leave_half(arguments[name])
        raise DiskFull("OSError: [Errno 28] No space left on device")


def test_a_job_that_found_the_disk_full_leaves_nothing_there(tmp_path: Path) -> None:
    state = State(tmp_path / "state")

    def learner(worker: Any) -> Learner:
        return Learner(worker, state, on_death=lambda _, why: pytest.fail(why))

    worker = FullWorker("out", "wire_header")
    opening = learner(worker)
    for _ in range(2):
        with pytest.raises(DiskFull):
            asyncio.run(opening.open())
    assert worker.opened == 1, "the task is built once"
    worker = FullWorker("own", "outgoing", "carry_out")
    with pytest.raises(DiskFull):
        asyncio.run(learner(worker).train(Round(0), Digest("0" * 64), None))
    assert worker.stopped, "the next attempt begins as this one did"
    left = [path for path in (tmp_path / "state").rglob("*") if path.suffix in (".tmp", ".part")]
    assert left == []
    state.close()


# -- the start ------------------------------------------------------------------------------------


def test_a_state_that_cannot_be_opened_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise DiskFull("full")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "clear_scratch", full)
        with pytest.raises(DiskFull):
            State(tmp_path / "state")
    State(tmp_path / "state").close()
