"""Any tampering with a journal is detected, at the first altered record."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lightyear_node.audit.self_check import SelfCheck, check_journal
from lightyear_node.audit.verify import Audit, head_contradiction, verify
from lightyear_node.errors import JournalCorrupt
from lightyear_node.storage.journal import Journal
from lightyear_node.storage.journal_reader import reading
from lightyear_node.types import PeerName, SignedHead
from tests.support.journals import IDENTITIES, JournalSite, alter, three_sites

A, B = PeerName("site-a"), PeerName("site-b")
KEYS = [IDENTITIES[A].certificate.signing_key]
ROUNDS = 3
RECORDS = 1 + 3 * ROUNDS + 2
"""Of the journal below: a start, three per round, another start and a seal."""
COMMITS = (4, 7, 10)

NUMBERS = ("wall_ns", "lamport", "round")
TEXTS = ("kind", "body", "hash")
ANY_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
ANY_VALUE = st.integers(-(2**63), 2**63 - 1) | ANY_TEXT | st.binary(max_size=8) | st.floats()

SEQ = st.integers(1, RECORDS)
thorough = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sites = three_sites(tmp_path_factory.mktemp("sites"), ROUNDS)
    site = sites[A]
    site.close()
    site.open()
    site.seal(ROUNDS)
    site.close()
    assert site.round_journal.length == RECORDS
    return site.path


@pytest.fixture
def journal(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(original, tmp_path / "journal.db"))


@pytest.fixture
def fresh(original: Path, journal: Path) -> Callable[[], Path]:
    """A new copy of the journal for every example."""
    return lambda: Path(shutil.copy(original, journal))


def audit(path: Path, keys: list[bytes] = KEYS) -> Audit:
    with reading(path) as copy:
        return verify(copy, keys)


def first_bad(path: Path) -> int:
    finding = audit(path).finding
    assert finding is not None
    assert f"record {finding.seq} " in finding.about
    assert finding.advice
    return finding.seq


def content(path: Path) -> list[Any]:
    db = sqlite3.connect(path)
    try:
        tables = ("records", "heads", "newest")
        return [db.execute(f"SELECT * FROM {table}").fetchall() for table in tables]
    finally:
        db.close()


def set_value(path: Path, table: str, column: str, seq: int, value: Any) -> None:
    """Set one column of one row; assumes that it can be stored and changes something."""
    before = content(path)
    db = sqlite3.connect(path, isolation_level=None)
    try:
        db.execute(f"UPDATE {table} SET {column} = ? WHERE seq = ?", (value, seq))
    except sqlite3.Error:
        assume(False)
    finally:
        db.close()
    assume(repr(content(path)) != repr(before))


def test_the_self_check_detects_damage(journal: Path) -> None:
    """Also while the node has the journal open, and if the file is truncated."""
    running = Journal(journal)
    assert check_journal(journal.parent, KEYS, closed=True) == SelfCheck()
    alter(journal, "UPDATE records SET body = '{}' WHERE seq = 3")
    found = check_journal(journal.parent, KEYS).damage
    assert found is not None
    assert "record 3 is not what was written" in found
    running.close()
    for rest in journal.parent.glob("journal.db-*"):
        rest.unlink()
    journal.write_bytes(journal.read_bytes()[:5000])
    assert check_journal(journal.parent, KEYS).damage is not None


def test_an_unaltered_journal_is_valid(journal: Path) -> None:
    found = audit(journal)
    assert found.finding is None
    assert (found.site, found.federation) == ("site-a", "ward")
    assert (found.first_seq, found.last_seq) == (1, RECORDS)
    assert (found.rounds, found.signed) == (ROUNDS, ROUNDS)
    assert audit(journal, []).signed == 0


@thorough
@given(seq=SEQ, column=st.sampled_from(NUMBERS + TEXTS), value=ANY_VALUE)
def test_any_edit_of_a_record_is_detected_there(
    fresh: Callable[[], Path], seq: int, column: str, value: object
) -> None:
    path = fresh()
    set_value(path, "records", column, seq, value)
    assert first_bad(path) == seq


@thorough
@given(seq=SEQ, at=st.integers(0, 10_000), char=st.characters(exclude_categories=("Cs",)))
def test_any_changed_character_of_a_body_is_detected(
    fresh: Callable[[], Path], seq: int, at: int, char: str
) -> None:
    path = fresh()
    body = content(path)[0][seq - 1][5]
    at %= len(body)
    set_value(path, "records", "body", seq, body[:at] + char + body[at + 1 :])
    assert first_bad(path) == seq


@thorough
@given(seq=SEQ, number=st.integers(-(2**63), 2**63 - 1))
def test_a_renumbered_record_is_detected_in_its_place(
    fresh: Callable[[], Path], seq: int, number: int
) -> None:
    path = fresh()
    set_value(path, "records", "seq", seq, number)
    assert first_bad(path) == (1 if number < 1 else seq)


@pytest.mark.parametrize("seq", range(1, RECORDS + 1))
def test_any_removed_record_is_detected(journal: Path, seq: int) -> None:
    alter(journal, f"DELETE FROM records WHERE seq = {seq}")
    assert first_bad(journal) == seq


@thorough
@given(pair=st.tuples(SEQ, SEQ).filter(lambda pair: pair[0] < pair[1]), whole=st.booleans())
def test_any_two_swapped_records_are_detected(
    fresh: Callable[[], Path], pair: tuple[int, int], whole: bool
) -> None:
    """Whole rows, or only their bodies."""
    path = fresh()
    first, second = pair
    if whole:
        steps = [(first, -1), (second, first), (-1, second)]
        alter(path, *(f"UPDATE records SET seq = {to} WHERE seq = {at}" for at, to in steps))
    else:
        bodies = [row[5] for row in content(path)[0]]
        assume(bodies[first - 1] != bodies[second - 1])
        for at, body in ((first, bodies[second - 1]), (second, bodies[first - 1])):
            set_value(path, "records", "body", at, body)
    assert first_bad(path) == first


@pytest.mark.parametrize("last", range(RECORDS))
def test_any_truncation_of_the_records_alone_is_detected(journal: Path, last: int) -> None:
    alter(
        journal,
        f"DELETE FROM records WHERE seq > {last}",
        f"DELETE FROM heads WHERE seq > {last}",
    )
    assert first_bad(journal) == last + 1


@pytest.mark.parametrize("last", range(max(COMMITS)))
def test_a_consistent_truncation_is_detected_by_a_witness(journal: Path, last: int) -> None:
    """Cutting the notes and the durable state, too, does not change the heads that peers hold."""
    alter(
        journal,
        f"DELETE FROM records WHERE seq > {last}",
        f"DELETE FROM heads WHERE seq > {last}",
        "DELETE FROM memory",
        "DELETE FROM newest",
        f"INSERT INTO newest SELECT 1, seq, hash FROM records WHERE seq = {last}",
    )
    head = SignedHead(max(COMMITS), *_head(original_of(journal), max(COMMITS)))
    with reading(journal) as copy:
        contradiction = head_contradiction(
            "site-b", head, length=last, found=copy.hash_of(head.seq)
        )
    assert contradiction is not None
    assert "cut short" in contradiction


def original_of(journal: Path) -> JournalSite:
    """The same rounds again, with the same hashes."""
    return three_sites(journal.parent / "again", ROUNDS)[A]


def _head(site: JournalSite, seq: int) -> tuple[Any, bytes]:
    with reading(site.path) as copy:
        hash, signature = copy.heads[seq]
    return hash, bytes.fromhex(signature)


@thorough
@given(
    seq=st.sampled_from(COMMITS),
    column=st.sampled_from(["hash", "signature"]),
    value=ANY_VALUE,
)
def test_any_edit_of_a_signature_is_detected(
    fresh: Callable[[], Path], seq: int, column: str, value: object
) -> None:
    path = fresh()
    set_value(path, "heads", column, seq, value)
    assert first_bad(path) == seq


@pytest.mark.parametrize("written", ["upper(signature)", "signature || ' '", "' ' || signature"])
def test_a_signature_in_another_notation_is_an_edit(journal: Path, written: str) -> None:
    alter(journal, f"UPDATE heads SET signature = {written} WHERE seq = 7")
    assert first_bad(journal) == 7


@thorough
@given(seq=st.sampled_from(COMMITS), number=st.integers(-20, 20))
def test_a_signature_with_another_number_is_detected(
    fresh: Callable[[], Path], seq: int, number: int
) -> None:
    path = fresh()
    set_value(path, "heads", "seq", seq, number)
    assert first_bad(path) == min(seq, number)


@pytest.mark.parametrize("seq", COMMITS)
def test_a_removed_signature_is_detected(journal: Path, seq: int) -> None:
    alter(journal, f"DELETE FROM heads WHERE seq = {seq}")
    assert first_bad(journal) == seq


@thorough
@given(column=st.sampled_from(["seq", "hash"]), value=ANY_VALUE)
def test_an_edit_of_the_note_of_the_newest_record_is_detected(
    fresh: Callable[[], Path], column: str, value: object
) -> None:
    path = fresh()
    set_value(path, "newest", column, RECORDS, value)
    assert first_bad(path) in (RECORDS, RECORDS + 1)


def test_a_removed_note_of_the_newest_record_is_detected(journal: Path) -> None:
    alter(journal, "DELETE FROM newest")
    assert first_bad(journal) == RECORDS


@pytest.mark.parametrize("seq", range(1, max(COMMITS) + 1))
def test_a_journal_rewritten_without_the_key_is_detected(journal: Path, seq: int) -> None:
    """All hashes are consistent again, but the next signature does not match."""
    with reading(journal) as copy:
        rows = list(copy.rows())
    before = rows[seq - 2].hash if seq > 1 else "0" * 64
    alter(journal, f"UPDATE records SET wall_ns = wall_ns + 1 WHERE seq = {seq}")
    for row in rows[seq - 1 :]:
        with reading(journal) as copy:
            altered = next(one for one in copy.rows() if one.seq == row.seq)
        hash = before = str(altered.hash_after(before))
        alter(journal, f"UPDATE records SET hash = '{hash}' WHERE seq = {row.seq}")
    alter(journal, f"UPDATE newest SET hash = '{before}'")
    assert first_bad(journal) == min(commit for commit in COMMITS if commit >= seq)


def test_signatures_of_another_key_are_refused(journal: Path) -> None:
    found = audit(journal, [IDENTITIES[B].certificate.signing_key])
    assert found.finding is not None
    assert found.finding.seq == 1
    assert "another signing key" in found.finding.about
    assert "--certificate" in found.finding.advice
    both = [IDENTITIES[B].certificate.signing_key, *KEYS]
    assert audit(journal, both).finding is None


@pytest.mark.parametrize(
    ("key", "value", "seq"),
    [
        ("models", '["other"]', max(COMMITS)),
        ("barrier", '{"round": 1}', max(COMMITS)),
        ("manifest", "{}", RECORDS),
        ("manifest", "no JSON", RECORDS),
    ],
)
def test_a_durable_state_that_contradicts_the_last_records_is_detected(
    journal: Path, key: str, value: str, seq: int
) -> None:
    alter(journal, f"UPDATE memory SET value = '{value}' WHERE key = '{key}'")
    assert first_bad(journal) == seq


def test_journals_from_before_signatures_are_valid(tmp_path: Path) -> None:
    site = JournalSite(tmp_path / "old", IDENTITIES[A])
    site.close()
    for rest in site.path.parent.glob("journal*"):
        rest.unlink()
    # As older versions wrote it: without key and signature.
    journal = Journal(site.path)
    journal.append("start", {}, wall_ns=1, lamport=1, round=0)
    left = {"models": ["m"], "barrier": {"round": 1}}
    journal.append("commit", {"model": "m"}, wall_ns=1, lamport=2, round=0, remember=left)
    journal.close()
    alter(site.path, "DROP TABLE heads", "DROP TABLE newest")
    found = audit(site.path)
    assert found.finding is None
    assert (found.rounds, found.signed) == (1, 0)


def test_a_damaged_file_is_reported_as_corrupt(journal: Path) -> None:
    damaged = bytearray(journal.read_bytes())
    damaged[5000:9000] = b"\xee" * 4000
    journal.write_bytes(damaged)
    with pytest.raises(JournalCorrupt), reading(journal, thoroughly=True) as copy:
        verify(copy, KEYS)
