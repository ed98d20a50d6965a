"""No space left: every step that writes can be retried, and nothing is lost."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.errors import DiskFull, JournalCorrupt, StoreError
from lightyear_node.node.worker_jobs import WorkerJobs
from lightyear_node.protocol.durable_state import DurableState
from lightyear_node.storage.blobs import BlobStore
from lightyear_node.storage.journal import Journal
from lightyear_node.storage.journal_memory import BestModel
from lightyear_node.storage.round_journal import RoundJournal
from lightyear_node.storage.state_directory import StateDirectory
from lightyear_node.types import Digest, Generation, Round
from tests.support.journal_records import first_bad_record, read_records
from tests.support.journals import alter
from tests.support.sqlite_connections import recorded_connections
from tests.unit.node.test_retention import Room
from tests.unit.storage.test_blobs import CHUNKS, DIGEST, begin
from tests.unit.storage.test_round_journal import FIRST, RoundJournalFile, decided

# -- files ----------------------------------------------------------------------------------------


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_write_that_fails_is_a_store_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    incoming = begin(BlobStore(tmp_path))

    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
    with pytest.raises(DiskFull, match="No space left"):
        incoming.write(CHUNKS[0])
    assert incoming.next_chunk == 0
    monkeypatch.setattr(os, "pwrite", failing(errno.EIO))
    with pytest.raises(StoreError) as caught:
        incoming.write(CHUNKS[0])
    assert not isinstance(caught.value, DiskFull), "a broken disk is not a full one"
    assert incoming.next_chunk == 0


def test_a_short_write_continues_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlobStore(tmp_path)
    incoming = begin(store)
    actual = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, raw, at: actual(fd, raw[:70_000], at))
    for chunk in CHUNKS:
        incoming.write(chunk)
    incoming.finish()
    assert store.verify(DIGEST)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failed_sync_is_never_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The kernel drops pages that it could not write: a second fsync would succeed wrongly."""
    store = BlobStore(tmp_path)
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


def test_complete_partial_and_used_files_are_listed(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    scratch = store.scratch_path()
    scratch.write_bytes(b"ours")
    ours = store.adopt(scratch).digest
    incoming = begin(store)
    incoming.write(CHUNKS[0])
    assert (store.complete_files(), store.partial_files(), store.in_use()) == (
        {ours},
        {DIGEST},
        {ours, DIGEST},
    )
    store.discard(DIGEST)
    assert store.partial_files() == {DIGEST}, "what is arriving stays"
    incoming.close()
    store.discard(DIGEST)
    assert store.partial_files() == set()
    store.retain({ours})
    assert store.in_use() == {ours}
    store.retain(set())
    assert store.in_use() == set()
    assert store.complete_files() == set()


def test_temporary_files_of_a_killed_worker_are_deleted(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
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


def test_a_full_journal_raises_disk_full_and_works_later(tmp_path: Path) -> None:
    """SQLite's own error: the file may have no more pages."""
    with recorded_connections(sqlite3.Connection) as opened:
        journal = Journal(tmp_path / "journal.db")
    append(journal, "first")
    [(pages,)] = opened[-1].execute("PRAGMA page_count")
    opened[-1].execute(f"PRAGMA max_page_count = {pages}")
    for _ in range(3):
        with pytest.raises(DiskFull, match=r"journal.db.*full"):
            append(journal, "x" * 100_000)
        assert journal.memory() == {"last": "first"}
    opened[-1].execute("PRAGMA max_page_count = 1000000")
    append(journal, "x" * 100_000)
    assert [record.seq for record in read_records(journal)] == [1, 2]
    assert first_bad_record(journal) is None


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
    with recorded_connections(FailingConnection) as opened:
        journal = Journal(tmp_path / "journal.db")
    append(journal, "first")
    opened[-1].code = code
    with pytest.raises(StoreError) as caught:
        append(journal, "second")
    assert type(caught.value) is kind
    opened[-1].code = None
    assert not opened[-1].in_transaction
    if kind is JournalCorrupt:
        with pytest.raises(JournalCorrupt):  # what was found damaged is never continued
            append(journal, "third")
        return
    append(journal, "third")
    assert [record.body["body"] for record in read_records(journal)] == ["first", "third"]
    assert first_bad_record(journal) is None


class FailingConnection(sqlite3.Connection):
    """Commits fail with this code of SQLite, if there is one."""

    code: int | None = None

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if statement == "COMMIT" and self.code is not None:
            problem = sqlite3.OperationalError("as the disk reports")
            problem.sqlite_errorcode = self.code
            raise problem
        return super().execute(statement, *values)


def test_a_memory_that_is_not_json_is_damage(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    journal = Journal(tmp_path / "state" / "journal.db")
    append(journal, "first")
    alter(journal.path, "UPDATE memory SET value = '{'")
    with pytest.raises(JournalCorrupt, match="cannot be read") as caught:
        journal.memory()
    assert f"mv {tmp_path}/state {tmp_path}/state.damaged" in str(caught.value.hint)


# -- the round journal ----------------------------------------------------------------------------


def test_a_failed_record_changes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a heartbeat could announce what a crash would undo."""
    stored = RoundJournalFile(tmp_path / "journal.db")
    stored.decide(0, FIRST)
    before = dict(vars(stored.round_journal))

    def full(*_: Any, **__: Any) -> None:
        raise DiskFull("full")

    monkeypatch.setattr(Journal, "append", full)
    memory = DurableState(Generation(0), Round(1))
    for step in (
        lambda: stored.round_journal.decide(*decided(1), {}),
        lambda: stored.round_journal.commit(Round(0), Digest("n"), memory, {"loss": 0.1}),
        lambda: stored.round_journal.fall_back(Digest("m"), []),
        lambda: stored.round_journal.settings({}, certificate="c", agreement=Digest("a")),
        lambda: stored.round_journal.start(
            schema=Digest("s"), initial_model=Digest("i"), rule="other", about={}
        ),
    ):
        with pytest.raises(DiskFull):
            step()
        assert vars(stored.round_journal) == before
    monkeypatch.undo()
    room = Room(tmp_path / "room")
    offered, manifest = room.seal(0), room.round_journal.manifest
    monkeypatch.setattr(Journal, "append", full)
    with pytest.raises(DiskFull):
        room.seal(1)
    assert (room.round_journal.offered, room.round_journal.manifest) == ([offered], manifest)


def test_the_last_models_and_the_best_are_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")

    def opened() -> RoundJournal:
        return RoundJournal(journal, wall_ns=lambda: 0, models_kept=2)

    round_journal = opened()
    round_journal.models = [Digest("initial")]
    losses = [0.9, 0.2, 0.5, float("nan"), 0.3]
    for round, loss in enumerate(losses):
        memory = DurableState(Generation(0), Round(round + 1))
        round_journal.commit(Round(round), Digest(f"m{round}"), memory, {"loss": loss})
    assert round_journal.models == ["m4", "m3"]
    assert round_journal.best == BestModel(Digest("m1"), 1, 0.2)
    assert opened().kept_models == {"m4", "m3", "m1"}
    # A round that changed nothing adds no model.
    round_journal.commit(Round(5), Digest("m4"), DurableState(Generation(0), Round(6)), {})
    assert round_journal.models == ["m4", "m3"]
    round_journal.fall_back(Digest("m3"), [Digest("m4")])
    again = opened()
    assert (again.model, again.best) == ("m3", round_journal.best)
    [record] = read_records(journal, "fallback")
    assert record.body == {"model": "m3", "damaged": ["m4"]}


# -- the worker's files ---------------------------------------------------------------------------


def leave_half(path: str) -> None:
    for name in (path, path + ".part"):
        Path(name).write_bytes(b"half")


class FullWorker:
    """Writes half of its file, then reports a full disk."""

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


def test_a_job_that_fails_on_a_full_disk_leaves_no_files(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path / "state")

    def worker_jobs(worker: Any) -> WorkerJobs:
        return WorkerJobs(worker, state, on_death=lambda _, why: pytest.fail(why))

    worker = FullWorker("out", "wire_header")
    opening = worker_jobs(worker)
    for _ in range(2):
        with pytest.raises(DiskFull):
            asyncio.run(opening.open())
    assert worker.opened == 1, "the task is built once"
    worker = FullWorker("own", "outgoing", "carry_out")
    with pytest.raises(DiskFull):
        asyncio.run(worker_jobs(worker).train(Round(0), Digest("0" * 64), None))
    assert worker.stopped, "the next attempt begins as this one did"
    left = [path for path in (tmp_path / "state").rglob("*") if path.suffix in (".tmp", ".part")]
    assert left == []
    state.close()


# -- the start ------------------------------------------------------------------------------------


def test_a_state_directory_that_cannot_be_opened_is_unlocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise DiskFull("full")

    with monkeypatch.context() as patch:
        patch.setattr(BlobStore, "clear_scratch", full)
        with pytest.raises(DiskFull):
            StateDirectory(tmp_path / "state")
    StateDirectory(tmp_path / "state").close()
