"""The hash chain covers everything that a restart reads, and lost records are detected."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lightyear_node.audit.self_check import SelfCheck, check_journal
from lightyear_node.audit.verify import Audit, verify
from lightyear_node.errors import JournalCorrupt, TooManyFiles
from lightyear_node.identity.keys import make_identity
from lightyear_node.storage.high_water_mark import HighWaterMark, mark_path, read_mark
from lightyear_node.storage.journal import Journal
from lightyear_node.storage.journal_reader import reading
from tests.support.descriptor_exhaustion import no_descriptors
from tests.support.journal_records import read_records
from tests.support.journals import IDENTITIES, NAMES, NOW, JournalSite, alter, three_sites

KEYS = [IDENTITIES[NAMES[0]].certificate.signing_key]
OLD = Path(__file__).parent / "data/journal-without-memory-digest.sql"
OLD_KEY = Ed25519PrivateKey.from_private_bytes(b"\1" * 32)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sites = three_sites(tmp_path_factory.mktemp("sites"), 2)
    site = sites[NAMES[0]]
    site.seal(2)
    site.close()
    return site.path


@pytest.fixture
def journal(original: Path, tmp_path: Path) -> Path:
    for one in original.parent.glob("journal*"):
        shutil.copy(one, tmp_path / one.name)
    return tmp_path / "journal.db"


def audit(path: Path, keys: list[bytes] = KEYS) -> Audit:
    with reading(path, thoroughly=True) as copy:
        return verify(copy, keys)


def contents(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.glob("journal*")}


def refused(path: Path, about: str) -> JournalCorrupt:
    """Opening fails with one sentence and a hint, and no file is changed."""
    shm = path.with_name("journal.db-shm")
    before = contents(path.parent)
    with pytest.raises(JournalCorrupt, match=about) as caught:
        Journal(path)
    after = contents(path.parent)
    assert {**after, shm.name: b""} == {**before, shm.name: b""}, "only SQLite's index may change"
    assert caught.value.exit_code == 4
    assert caught.value.hint
    return caught.value


def test_a_flipped_bit_of_any_value_is_detected(journal: Path) -> None:
    with sqlite3.connect(journal) as db:
        values = dict(db.execute("SELECT key, value FROM memory"))
    db.close()
    assert {"barrier", "models", "rule_state", "begun"} <= values.keys()
    for key, value in values.items():
        for at in {0, len(value) // 2, len(value) - 1}:
            flipped = value[:at] + chr(ord(value[at]) ^ 1) + value[at + 1 :]
            _set(journal, key, flipped)
            refused(journal, "what it remembers is not what record 8 left")
            finding = audit(journal).finding
            assert finding is not None
            assert finding.seq <= 8
            assert check_journal(journal.parent, KEYS).damage is not None
        _set(journal, key, value)
    assert audit(journal).finding is None


def _set(path: Path, key: str, value: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute("UPDATE memory SET value = ? WHERE key = ?", (value, key))
    db.close()


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM memory WHERE key = 'rule'",
        "DELETE FROM memory",
        "INSERT INTO memory VALUES ('more', '1')",
        "UPDATE memory SET key = 'barriers' WHERE key = 'barrier'",
        "UPDATE memory SET value = CAST(value AS BLOB) WHERE key = 'rule'",
        "UPDATE memory SET value = x'ff' WHERE key = 'rule'",
    ],
)
def test_an_added_removed_or_retyped_value_is_detected(journal: Path, statement: str) -> None:
    alter(journal, statement)
    refused(journal, "journal.db")
    with contextlib.suppress(JournalCorrupt):
        assert audit(journal).finding is not None


def test_every_change_of_memory_is_covered_by_its_record(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    for number in range(3):
        journal.append(
            "event", {}, wall_ns=1, lamport=1, round=0, remember={f"key-{number}": number, "all": 1}
        )
    journal.append("event", {}, wall_ns=1, lamport=1, round=0)
    journal.close()
    assert Journal(journal.path).memory() == {"key-0": 0, "key-1": 1, "key-2": 2, "all": 1}


def test_a_record_does_not_show_the_digest_of_the_memory(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    record = journal.append("event", {"number": 1}, wall_ns=1, lamport=1, round=0)
    assert record.body == {"number": 1}
    assert [one.body for one in read_records(journal)] == [{"number": 1}]


# -- journals of earlier versions -----------------------------------------------------------------


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old" / "journal.db"
    path.parent.mkdir()
    db = sqlite3.connect(path)
    db.executescript(OLD.read_text())
    db.close()
    return path


def test_an_old_journal_verifies_and_is_covered_from_the_next_record_on(old: Path) -> None:
    key = OLD_KEY.public_key().public_bytes_raw()
    found = audit(old, [key])
    assert (found.finding, found.last_seq, found.signed) == (None, 8, 2)
    _set(old, "rule", '"other"')
    assert audit(old, [key]).finding is None, "it was not covered then"
    _set(old, "rule", '"lightyear"')

    site = JournalSite(old.parent / "home", make_identity(NAMES[0], NOW, OLD_KEY))
    site.close()
    for rest in site.path.parent.glob("journal*"):
        rest.unlink()
    shutil.copy(old, site.path)
    site.open()
    assert [entry["round"] for entry in site.round_journal.rounds()] == [0, 1]
    assert site.round_journal.memory.round == 2
    site.commit(2)
    site.close()
    found = audit(site.path, [key])
    assert (found.finding, found.last_seq, found.signed) == (None, 10, 3)
    _set(site.path, "rule", '"other"')
    refused(site.path, "what it remembers is not what record 10 left")


def test_an_old_memory_that_cannot_be_read_is_reported(old: Path) -> None:
    _set(old, "barrier", '{"round": 2}')
    site = JournalSite(old.parent / "home", make_identity(NAMES[0], NOW, OLD_KEY))
    site.close()
    for rest in site.path.parent.glob("journal*"):
        rest.unlink()
    shutil.copy(old, site.path)
    with pytest.raises(JournalCorrupt, match="cannot be understood") as caught:
        site.open()
    assert caught.value.hint


# -- lost committed records -----------------------------------------------------------------------


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """A journal after a crash: its newest records are only in the write-ahead log."""
    running = JournalSite(tmp_path / "running", IDENTITIES[NAMES[0]])
    running.seal(0)
    left = tmp_path / "left"
    left.mkdir()
    for one in running.path.parent.glob("journal*"):
        shutil.copy(one, left / one.name)
    running.close()
    assert (left / "journal.db-wal").stat().st_size > 0
    return left / "journal.db"


def test_nothing_is_lost_after_a_crash(crashed: Path) -> None:
    journal = Journal(crashed)
    assert journal.length == 2
    journal.close()
    assert check_journal(crashed.parent, KEYS) == SelfCheck()


def test_a_damaged_frame_of_the_write_ahead_log_is_detected(crashed: Path) -> None:
    """SQLite silently ignores the records from there on."""
    log = crashed.with_name("journal.db-wal")
    whole = log.read_bytes()
    log.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    with sqlite3.connect(f"file:{crashed}?mode=ro", uri=True) as db:
        assert db.execute("SELECT max(seq) FROM records").fetchone() == (1,)
    db.close()
    refused(crashed, "2 records were written, but it ends at 1")
    finding = audit(crashed).finding
    assert finding is not None
    assert "2 records were committed, but it ends at 1" in finding.about


@pytest.mark.parametrize("lost", [("-wal",), ("-wal", "-shm"), ("",), ("", "-wal", "-shm")])
def test_lost_files_are_detected(crashed: Path, lost: tuple[str, ...]) -> None:
    for which in lost:
        crashed.with_name(f"journal.db{which}").unlink()
    problem = refused(crashed, "2 records were written, but it ends at")
    assert "--recovered" in str(problem.hint)


def test_an_operator_may_continue_without_the_lost_records(crashed: Path) -> None:
    crashed.with_name("journal.db-wal").unlink()
    journal = Journal(crashed, recovered=True)
    assert journal.length < 2
    journal.append("event", {}, wall_ns=1, lamport=1, round=0)
    journal.close()
    assert Journal(crashed).length == journal.length


@pytest.mark.parametrize("content", [b"", b"\0" * 103, b"rubbish", b"\xff\xfe", b"9" * 500])
def test_an_invalid_mark_is_ignored(crashed: Path, content: bytes) -> None:
    mark_path(crashed).write_bytes(content)
    assert read_mark(crashed) is None
    assert Journal(crashed).length == 2


def test_an_older_mark_is_harmless_and_one_of_another_journal_is_not(
    crashed: Path, journal: Path
) -> None:
    mark = read_mark(crashed)
    assert mark is not None
    db = Journal(crashed)
    db.append("event", {}, wall_ns=1, lamport=1, round=0)
    db.close()
    mark_path(crashed).write_text(mark.line())
    Journal(crashed).close()
    mark_path(journal).write_text(HighWaterMark(2, "f" * 64).line())
    refused(journal, "record 2 is not the one that was committed")


# -- while it is in use ---------------------------------------------------------------------------


def append(journal: Journal) -> None:
    journal.append("event", {}, wall_ns=1, lamport=99, round=9)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE records SET hash = 'x' WHERE seq = 8",
        "DELETE FROM records WHERE seq = 8",
        "INSERT INTO records VALUES (9, 1, 1, 1, 'kind', '{}', 'x')",
    ],
)
def test_a_journal_with_another_end_is_not_continued(journal: Path, statement: str) -> None:
    running = Journal(journal)
    alter(journal, statement)
    for _ in range(2):
        with pytest.raises(JournalCorrupt, match="changed while in use"):
            append(running)
    assert running.broken is not None


def test_a_deleted_file_is_not_continued(journal: Path) -> None:
    """SQLite would keep writing to the deleted file."""
    running = Journal(journal)
    journal.rename(journal.with_name("elsewhere"))
    with pytest.raises(JournalCorrupt, match="moved or replaced"):
        append(running)
    shutil.copy(journal.with_name("elsewhere"), journal)
    with pytest.raises(JournalCorrupt, match="moved or replaced"):
        append(running)


def test_a_journal_found_damaged_is_not_continued(journal: Path) -> None:
    running = Journal(journal)
    running.broken = "our journal: record 3 is not what was written"
    with pytest.raises(JournalCorrupt, match="record 3"):
        append(running)
    assert running.length == 8


# -- no descriptors -------------------------------------------------------------------------------


def test_a_lack_of_descriptors_is_not_damage(journal: Path) -> None:
    """A shortage ends; a node that took it for damage would stop for good."""
    running = Journal(journal)
    with no_descriptors():
        for look in (
            lambda: Journal(journal),
            lambda: check_journal(journal.parent, KEYS, closed=True),
            lambda: audit(journal),
        ):
            with pytest.raises(TooManyFiles):
                look()
    assert running.broken is None
    append(running)
    running.close()
    assert check_journal(journal.parent, KEYS).damage is None
