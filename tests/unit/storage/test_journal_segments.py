"""A segmented journal has the same content as one file, also after crashes."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.audit.compare import compare
from lightyear_node.audit.export import export_lines, open_records, read_export, write_jsonl
from lightyear_node.audit.rounds import rounds_of
from lightyear_node.audit.self_check import SelfCheck, check_journal
from lightyear_node.audit.verify import Audit, verify
from lightyear_node.errors import JournalCorrupt, StoreError
from lightyear_node.storage import journal as journal_module
from lightyear_node.storage import journal_segments
from lightyear_node.storage.journal import Journal
from lightyear_node.storage.journal_reader import peek, reading
from lightyear_node.types import PeerName, SignedHead
from tests.support.journal_records import read_records
from tests.support.journals import IDENTITIES, NAMES, JournalSite, alter, three_sites
from tests.support.sqlite_connections import recorded_connections

A, B = NAMES[:2]
KEYS = [IDENTITIES[A].certificate.signing_key]
ROUNDS = 32
SMALL = 48 << 10


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", SMALL)


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[dict[PeerName, JournalSite]]:
    sites = three_sites(tmp_path, ROUNDS)
    yield sites
    for site in sites.values():
        site.close()


@pytest.fixture
def site(sites: dict[PeerName, JournalSite]) -> JournalSite:
    return sites[A]


def closed_files(site: JournalSite) -> list[Path]:
    return sorted(site.path.parent.glob("journal-*.db"))


def audit(path: Path) -> Audit:
    with reading(path, thoroughly=True) as copy:
        return verify(copy, KEYS)


def test_the_live_file_stays_small_and_nothing_is_lost(site: JournalSite) -> None:
    assert len(closed_files(site)) >= 3
    found = audit(site.path)
    assert (found.finding, found.absent) == (None, ())
    assert (found.first_seq, found.last_seq) == (1, 1 + 3 * ROUNDS)
    assert (found.rounds, found.signed) == (ROUNDS, ROUNDS)
    assert [record.seq for record in read_records(site.journal)] == list(range(1, 2 + 3 * ROUNDS))
    with reading(site.path, live_only=True) as copy:
        assert sum(1 for _ in copy.rows()) < ROUNDS
    assert check_journal(site.path.parent, KEYS, closed=True) == SelfCheck()


def test_segments_continue_after_a_restart(site: JournalSite) -> None:
    before = site.round_journal.memory, site.round_journal.models, site.round_journal.head
    site.close()
    site.open()
    assert (site.round_journal.memory, site.round_journal.models, site.round_journal.head) == before
    assert [entry["round"] for entry in site.round_journal.rounds()][-1] == ROUNDS - 1
    assert "segments" not in site.journal.memory()
    assert peek(site.path)[1]["site"] == A
    site.seal(ROUNDS)
    assert audit(site.path).finding is None


def test_every_closed_segment_ends_with_a_signature_and_verifies_alone(site: JournalSite) -> None:
    first = 1
    for path in closed_files(site):
        with reading(path, thoroughly=True, live_only=True) as copy:
            found = verify(copy, KEYS)
            heads = copy.heads
        assert (found.finding, found.first_seq) == (None, first)
        assert max(heads) == found.last_seq
        assert found.signed == found.rounds == len(heads)
        assert not path.stat().st_mode & 0o222
        first = found.last_seq + 1


def test_an_export_and_a_comparison_span_all_segments(
    sites: dict[PeerName, JournalSite], tmp_path: Path
) -> None:
    exported = tmp_path / "a.jsonl"
    with reading(sites[A].path) as a, reading(sites[B].path) as b:
        text = StringIO()
        assert write_jsonl(export_lines(a, None, None), text) == 1 + 3 * ROUNDS
        exported.write_text(text.getvalue())
        found = compare(a, b, ("a", "b"))
        assert (found.rounds, found.differences) == (ROUNDS, [])
        assert rounds_of(a.rows(round=1)).keys() == {1}
        hashes = {row.seq: row.hash for row in a.rows()}
    verified = verify(read_export(exported), KEYS)
    assert (verified.finding, verified.signed) == (None, ROUNDS)
    assert {seq: sites[A].round_journal.hash_of(seq) for seq in hashes} == hashes


def test_an_archived_segment_is_only_reported_by_name(site: JournalSite, tmp_path: Path) -> None:
    """The rest verifies, the node continues, and a segment that is put back is read again."""
    manifests = tmp_path / "archive"
    manifests.mkdir()
    first, second, *_ = closed_files(site)
    with reading(site.path) as copy:
        hashes = {row.seq: row.hash for row in copy.rows()}
    for path in (first, second):
        path.rename(manifests / path.name)
    found = audit(site.path)
    assert found.finding is None
    assert found.absent == (first.name, second.name)
    assert (found.site, found.federation) == (A, "ward")
    assert found.signed == found.rounds < ROUNDS
    assert site.round_journal.hash_of(1) == hashes[1], "the first and last of each are in the list"
    assert site.round_journal.hash_of(2) is None
    old = site.identity.sign_head("ward", 2, hashes[2])  # type: ignore[arg-type]
    assert site.witnesses.claimed(B, old) is None, "the segment is gone, so it cannot be checked"
    ahead = site.identity.sign_head("ward", 999, hashes[2])  # type: ignore[arg-type]
    assert "cut short" in str(site.witnesses.claimed(B, ahead))
    site.close()
    site.open()
    with open_records(site.path.parent) as source:
        text = StringIO()
        assert (
            write_jsonl(export_lines(source, None, None), text)
            == site.round_journal.length - found.first_seq + 1
        )
    (manifests / first.name).rename(first)
    assert audit(site.path).absent == (first.name, second.name), "no gap is skipped"
    (manifests / second.name).rename(second)
    assert audit(site.path).absent == ()


def test_old_claims_are_answered_from_closed_segments(site: JournalSite) -> None:
    with reading(site.path) as copy:
        heads = [SignedHead(seq, h, bytes.fromhex(s)) for seq, (h, s) in copy.heads.items()]
    assert [site.witnesses.claimed(B, head) for head in heads] == [None] * ROUNDS


@pytest.mark.parametrize("at", [0, -1])
def test_any_change_of_a_closed_segment_is_detected(site: JournalSite, at: int) -> None:
    path = closed_files(site)[at]
    os.chmod(path, 0o600)
    content = path.read_bytes()
    with reading(path, live_only=True) as copy:
        bad = next(iter(copy.rows())).seq + 3
    alter(path, f"UPDATE records SET body = '{{}}' WHERE seq = {bad}")
    finding = audit(site.path).finding
    assert finding is not None
    assert finding.seq == bad
    assert path.name in str(check_journal(site.path.parent, KEYS, closed=True).damage)
    # A change that no query would read.
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert audit(site.path).finding is not None
    path.write_bytes(content[:5000])
    with pytest.raises(JournalCorrupt, match=path.name):
        assert audit(site.path).finding is None
    assert path.name in str(check_journal(site.path.parent, KEYS, closed=True).damage)


def test_a_node_does_not_start_from_a_changed_segment(site: JournalSite) -> None:
    """A start verifies the newest segments before it reads them."""
    site.close()
    path = closed_files(site)[-1]
    os.chmod(path, 0o600)
    content = bytearray(path.read_bytes())
    at = content.rindex(b'"loss":1.25')
    content[at + 7] ^= 1  # still a number, and still a sound database
    path.write_bytes(content)
    with pytest.raises(JournalCorrupt, match=path.name) as caught:
        site.open()
    assert caught.value.hint


def test_a_changed_list_of_segments_is_refused(site: JournalSite) -> None:
    site.close()
    db = sqlite3.connect(site.path)
    [(text,)] = db.execute("SELECT value FROM memory WHERE key = 'segments'")
    db.close()
    listed = json.loads(text)
    for changed in (
        listed[:-1],
        listed[1:],
        [*listed, listed[-1]],
        {},
        "x",
        [{"file": "../x"}],
        [],
    ):
        alter(
            site.path,
            f"UPDATE memory SET value = '{json.dumps(changed)}' WHERE key = 'segments'",
        )
        with pytest.raises(JournalCorrupt):
            Journal(site.path)


class Crash(Exception):
    pass


class CrashingConnection(sqlite3.Connection):
    """If it `crashes`, it does so before the records of a closed segment are deleted."""

    crashes = False

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if self.crashes and statement.startswith("DELETE FROM records"):
            raise Crash
        return super().execute(statement, *values)


@pytest.mark.parametrize("point", ["sync", "file_sha256", "os.chmod", "os.replace", "DELETE"])
def test_a_crash_while_a_segment_is_closed_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    with recorded_connections(CrashingConnection) as opened:
        site = JournalSite(tmp_path / "site", IDENTITIES[A])
    grow(site, SMALL, monkeypatch)
    content = [row_of(record) for record in read_records(site.journal)]

    def crash(*_: Any) -> None:
        raise Crash

    with monkeypatch.context() as patched:
        if point == "DELETE":
            patched.setattr(opened[-1], "crashes", True)
        else:
            patched.setattr(f"lightyear_node.storage.journal_segments.{point}", crash)
        with pytest.raises(Crash):
            site.seal(999)
    site.close()
    assert audit(site.path).finding is None
    site.open()
    assert [row_of(record) for record in read_records(site.journal)][: len(content)] == content
    assert len(closed_files(site)) == 1, "closed at the first record of this life"
    assert not list(site.path.parent.glob("*.part"))
    assert audit(site.path).finding is None
    site.close()


def test_without_space_for_a_segment_the_live_file_keeps_growing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = JournalSite(tmp_path / "site", IDENTITIES[A])
    grow(site, SMALL, monkeypatch)

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(journal_segments, "sync", full)
        site.seal(900)
        site.commit(900)
    assert not closed_files(site)
    with monkeypatch.context() as patched:
        patched.setattr(
            journal_segments, "sync", lambda path: (_ for _ in ()).throw(OSError(5, "broken"))
        )
        with pytest.raises(StoreError, match="broken"):
            site.seal(901)
    site.seal(901)
    assert len(closed_files(site)) == 1
    assert audit(site.path).finding is None
    site.close()


def test_a_large_live_file_is_compacted_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a journal of an earlier version, with all records in one file."""
    site = JournalSite(tmp_path / "site", IDENTITIES[A])
    grow(site, 8 * SMALL, monkeypatch)
    site.close()
    large = site.path.stat().st_size
    for _ in range(2):
        site.open()
        site.close()
    assert len(closed_files(site)) == 1
    assert site.path.stat().st_size < large / 4
    assert audit(site.path).finding is None


def grow(site: JournalSite, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grow the live file to this size, ending with a signed record."""
    round = 0
    with monkeypatch.context() as patched:
        patched.setattr(journal_module, "SEGMENT_BYTES", 1 << 30)
        while live_bytes(site) < size + 4096:
            site.seal(round)
            site.decide(round, [])
            site.commit(round)
            round += 1


def live_bytes(site: JournalSite) -> int:
    """Size of the live file, with what is still in the write-ahead log."""
    with closing(sqlite3.connect(site.path)) as db:
        [(count,)], [(size,)] = (db.execute(f"PRAGMA {it}") for it in ("page_count", "page_size"))
    return int(count) * int(size)


def row_of(record: Any) -> tuple[int, str]:
    return record.seq, record.hash
