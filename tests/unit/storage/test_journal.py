"""The journal: completed appends are durable, and changes are detected."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightyear_node.errors import JournalCorrupt, StoreError
from lightyear_node.storage.hash_chain import FIRST_HASH
from lightyear_node.storage.journal import Journal
from lightyear_node.storage.journal_reader import peek, reading
from lightyear_node.types import Digest, SignedHead
from tests.support.journal_records import first_bad_record, read_records


def fill(journal: Journal, count: int = 5) -> None:
    for number in range(count):
        journal.append(
            "event",
            {"number": number},
            wall_ns=number,
            lamport=number + 10,
            round=number // 2,
            remember={"last": number},
        )


def test_memory_and_records_survive_a_restart(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    assert (journal.head, journal.length) == (FIRST_HASH, 0)
    fill(journal)
    head = journal.head
    journal.close()
    again = Journal(tmp_path / "journal.db")
    assert again.memory() == {"last": 4}
    assert (again.head, again.length) == (head, 5)
    assert [record.body["number"] for record in read_records(again)] == [0, 1, 2, 3, 4]
    assert [record.lamport for record in read_records(again)] == [10, 11, 12, 13, 14]
    assert [record.seq for record in again.recent(since_round=2)] == [5]
    again.append("event", {}, wall_ns=9, lamport=20, round=3)
    assert first_bad_record(again) is None


def test_a_failed_append_changes_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    fill(journal, 2)
    other = sqlite3.connect(tmp_path / "journal.db", isolation_level=None)
    other.execute(
        "CREATE TRIGGER full BEFORE INSERT ON records BEGIN SELECT RAISE(ABORT, 'full'); END"
    )
    with pytest.raises(StoreError, match="full"):
        journal.append("event", {}, wall_ns=0, lamport=0, round=9, remember={"last": 99})
    other.execute("DROP TRIGGER full")
    assert journal.memory() == {"last": 1}
    fill(journal, 1)
    assert first_bad_record(journal) is None


ALTERATIONS: list[tuple[str, int]] = [
    ("UPDATE records SET body = '{\"number\":9}' WHERE seq = 2", 2),
    ("UPDATE records SET lamport = lamport + 1 WHERE seq = 3", 3),
    ("UPDATE records SET kind = 'other' WHERE seq = 5", 5),
    ("UPDATE records SET body = 'no JSON' WHERE seq = 2", 2),
    ("UPDATE records SET body = '{\"number\": 1}' WHERE seq = 2", 2),
    ("UPDATE records SET wall_ns = 'soon' WHERE seq = 4", 4),
    ("DELETE FROM records WHERE seq = 2", 3),
    ("DELETE FROM records WHERE seq = 1", 2),
    ("UPDATE records SET seq = 99 WHERE seq = 5", 99),
    (
        "UPDATE records SET body = CASE seq WHEN 2 THEN '{\"number\":2}' ELSE '{\"number\":1}' END"
        " WHERE seq IN (2, 3)",
        2,
    ),
]


@pytest.mark.parametrize(("alteration", "first_bad"), ALTERATIONS)
def test_an_altered_history_is_detected(tmp_path: Path, alteration: str, first_bad: int) -> None:
    journal = Journal(tmp_path / "journal.db")
    fill(journal)
    sqlite3.connect(tmp_path / "journal.db", isolation_level=None).execute(alteration)
    assert first_bad_record(journal) == first_bad


@settings(max_examples=30, deadline=None)
@given(body=st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none()))
def test_any_plain_body_round_trips(
    tmp_path_factory: pytest.TempPathFactory, body: dict[str, Any]
) -> None:
    journal = Journal(tmp_path_factory.mktemp("journal") / "journal.db")
    journal.append("event", body, wall_ns=1, lamport=1, round=0, remember={"body": body})
    assert journal.memory() == {"body": body}
    assert first_bad_record(journal) is None


def test_a_damaged_file_is_refused_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal(path)
    fill(journal)
    journal.close()
    damaged = bytearray(path.read_bytes())
    damaged[100:3000] = b"\xee" * 2900
    path.write_bytes(damaged)
    with pytest.raises(JournalCorrupt) as caught:
        Journal(path)
    assert caught.value.exit_code == 4
    assert path.read_bytes() == bytes(damaged)


def test_peek_reads_everything_and_leaves_no_files(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    assert peek(path) == ({}, {})
    assert not list(tmp_path.iterdir())
    journal = Journal(path)
    for life in (1, 2):
        journal.append("start", {"life": life}, wall_ns=1, lamport=life, round=0)
    fill(journal)
    # Beside a writer whose newest rows are only in the -wal file.
    assert peek(path) == ({"last": 4}, {"life": 2})
    journal.close()
    before = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    assert sorted(before) == ["journal.db", "journal.mark"]
    assert peek(path) == ({"last": 4}, {"life": 2})
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == before


def test_peek_at_an_invalid_file_reports_damage(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(b"this is no journal" * 100)
    with pytest.raises(JournalCorrupt, match="cannot be read"):
        peek(path)


def signed(seq: int, hash: Digest) -> SignedHead:
    return SignedHead(seq, hash, f"{seq}".encode())


def test_a_signature_is_written_with_its_record_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal(path)
    assert journal.signed_head is None
    fill(journal, 1)
    assert journal.signed_head is None
    record = journal.append("event", {}, wall_ns=1, lamport=30, round=1, sign=signed)
    assert journal.signed_head == SignedHead(2, Digest(record.hash), b"2")
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("CREATE TRIGGER full BEFORE INSERT ON heads BEGIN SELECT RAISE(ABORT, 'full'); END")
    with pytest.raises(StoreError, match="full"):
        journal.append("event", {}, wall_ns=1, lamport=31, round=2, sign=signed)
    db.execute("DROP TRIGGER full")
    db.close()
    fill(journal, 1)
    journal.close()
    again = Journal(path)
    assert again.signed_head == SignedHead(2, Digest(record.hash), b"2")
    assert (again.length, again.hash_of(2), again.hash_of(4)) == (3, record.hash, None)
    assert first_bad_record(again) is None


def test_a_journal_of_an_earlier_version_can_be_continued(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal(path)
    fill(journal)
    journal.close()
    with sqlite3.connect(path, isolation_level=None) as db:
        db.execute("DROP TABLE heads")
        db.execute("DROP TABLE newest")
    db.close()
    with reading(path) as copy:
        assert (copy.heads, copy.newest) == ({}, None)
        assert len(list(copy.rows())) == 5
    again = Journal(path)
    again.append("event", {}, wall_ns=1, lamport=30, round=1, sign=signed)
    assert first_bad_record(again) is None
    with reading(path) as copy:
        assert (list(copy.heads), copy.newest) == ([6], (6, again.head))


@pytest.mark.parametrize(
    ("alteration", "about"),
    [
        ("DELETE FROM records WHERE seq >= 4", "its last record was number 5, but it ends at 3"),
        ("UPDATE records SET hash = 'x' WHERE seq = 5", "record 5 does not follow"),
        ("DELETE FROM records", "its records are missing"),
        ("DELETE FROM newest; DELETE FROM records WHERE seq = 5", "5 records were written"),
    ],
)
def test_a_truncated_journal_is_not_continued(tmp_path: Path, alteration: str, about: str) -> None:
    """Another record would hide the loss."""
    path = tmp_path / "journal.db"
    journal = Journal(path)
    fill(journal)
    journal.close()
    with sqlite3.connect(path, isolation_level=None) as db:
        db.executescript(alteration)
    db.close()
    before = path.read_bytes()
    with pytest.raises(JournalCorrupt, match=about) as caught:
        Journal(path)
    assert caught.value.hint
    assert path.read_bytes() == before
