"""The journal: what returned is durable, what was altered is noticed."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightyear_node.errors import JournalCorrupt, StoreError
from lightyear_node.journal import FIRST_HASH, Journal, peek, reading
from lightyear_node.records import Digest, SignedHead


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


def test_memory_and_records_come_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    assert (journal.head, journal.lamport) == (FIRST_HASH, 0)
    fill(journal)
    head = journal.head
    journal.close()
    again = Journal(tmp_path / "journal.db")
    assert again.memory() == {"last": 4}
    assert (again.head, again.lamport) == (head, 14)
    assert [record.body["number"] for record in again.records()] == [0, 1, 2, 3, 4]
    assert [record.seq for record in again.records("event", since_round=2)] == [5]
    again.append("event", {}, wall_ns=9, lamport=20, round=3)
    assert again.first_bad_record() is None


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
    assert journal.first_bad_record() is None


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
def test_an_altered_history_is_noticed(tmp_path: Path, alteration: str, first_bad: int) -> None:
    journal = Journal(tmp_path / "journal.db")
    fill(journal)
    sqlite3.connect(tmp_path / "journal.db", isolation_level=None).execute(alteration)
    assert journal.first_bad_record() == first_bad


@settings(max_examples=30, deadline=None)
@given(body=st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none()))
def test_any_plain_body_round_trips(
    tmp_path_factory: pytest.TempPathFactory, body: dict[str, Any]
) -> None:
    journal = Journal(tmp_path_factory.mktemp("journal") / "journal.db")
    journal.append("event", body, wall_ns=1, lamport=1, round=0, remember={"body": body})
    assert journal.memory() == {"body": body}
    assert journal.first_bad_record() is None


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


def test_peeking_sees_everything_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    assert peek(path) == ({}, {})
    assert not list(tmp_path.iterdir())
    journal = Journal(path)
    for life in (1, 2):
        journal.append("start", {"life": life}, wall_ns=1, lamport=life, round=0)
    fill(journal)
    # Beside the one who writes, whose newest rows are in the -wal file only.
    assert peek(path) == ({"last": 4}, {"life": 2})
    journal.close()
    before = path.read_bytes()
    assert peek(path) == ({"last": 4}, {"life": 2})
    assert [one.name for one in tmp_path.iterdir()] == ["journal.db"]
    assert path.read_bytes() == before


def test_peeking_into_rubbish_is_told_as_such(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(b"this is no journal" * 100)
    with pytest.raises(JournalCorrupt, match="cannot be read"):
        peek(path)


def signed(seq: int, hash: Digest) -> SignedHead:
    return SignedHead(seq, hash, f"{seq}".encode())


def test_a_signature_comes_with_its_record_or_not_at_all(tmp_path: Path) -> None:
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
    assert again.first_bad_record() is None


def test_a_journal_of_an_earlier_version_opens_and_goes_on(tmp_path: Path) -> None:
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
    assert again.first_bad_record() is None
    with reading(path) as copy:
        assert (list(copy.heads), copy.newest) == ([6], (6, again.head))


@pytest.mark.parametrize(
    "alteration",
    ["DELETE FROM records WHERE seq >= 4", "UPDATE records SET hash = 'x' WHERE seq = 5"],
)
def test_a_journal_that_was_cut_short_is_not_continued(tmp_path: Path, alteration: str) -> None:
    """The next record would cover it up."""
    path = tmp_path / "journal.db"
    journal = Journal(path)
    fill(journal)
    journal.close()
    with sqlite3.connect(path, isolation_level=None) as db:
        db.execute(alteration)
    db.close()
    with pytest.raises(JournalCorrupt, match=r"last record was number 5.*cut short") as caught:
        Journal(path)
    assert "audit verify" in str(caught.value.hint)
