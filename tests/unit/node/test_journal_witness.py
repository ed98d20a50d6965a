"""Peers as witnesses: the heads that they hold reveal a rewritten or restored journal."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lightyear_node.errors import PeerMisbehaved
from lightyear_node.types import PeerName, Reason, SignedHead
from tests.support.journals import (
    FEDERATION,
    IDENTITIES,
    JournalSite,
    digest,
    run_rounds,
    three_sites,
)

A, B, C = (PeerName(f"site-{letter}") for letter in "abc")
KEYS = {name: [one.certificate.signing_key] for name, one in IDENTITIES.items()}


@pytest.fixture
def sites(tmp_path: Path) -> dict[PeerName, JournalSite]:
    return three_sites(tmp_path)


def head_of(site: JournalSite) -> SignedHead:
    head = site.round_journal.head
    assert head is not None
    return head


def signed(name: PeerName, seq: int, content: str) -> SignedHead:
    return IDENTITIES[name].sign_head(FEDERATION, seq, digest(content))


def test_every_site_holds_the_newest_head_of_every_peer(sites: dict[PeerName, JournalSite]) -> None:
    for one in sites.values():
        for other in sites.values():
            if one is not other:
                assert other.witnesses.held(one.name) == head_of(one)
                assert one.witnesses.claimed(other.name, head_of(one)) is None
    assert sites[A].witnesses.held(PeerName("site-z")) is None


def test_an_older_head_changes_nothing(sites: dict[PeerName, JournalSite]) -> None:
    before = sites[A].witnesses.held(B)
    assert before is not None
    assert sites[A].witnesses.hold(B, signed(B, before.seq - 3, "x"), KEYS[B]) is None
    assert sites[A].witnesses.held(B) == before


def test_a_contradicting_head_is_reported_once_per_stored_head(
    sites: dict[PeerName, JournalSite],
) -> None:
    witnesses = sites[A].witnesses
    held = witnesses.held(B)
    assert held is not None
    words = witnesses.hold(B, signed(B, held.seq, "another history"), KEYS[B])
    assert words is not None
    assert f"site-b has signed two different journals up to record {held.seq}" in words
    assert witnesses.hold(B, signed(B, held.seq, "a third one"), KEYS[B]) is None
    assert witnesses.held(B) == held
    newer = signed(B, held.seq + 4, "further")
    assert witnesses.hold(B, newer, KEYS[B]) is None
    assert witnesses.held(B) == newer
    assert witnesses.hold(B, signed(B, newer.seq, "again another"), KEYS[B]) is not None


@pytest.mark.parametrize(
    "head",
    [
        signed(C, 99, "of another site"),
        SignedHead(99, digest("unsigned"), b"\0" * 64),
        SignedHead(-1, digest("negative"), b"\0" * 64),
        SignedHead(99, digest("short"), b""),
        IDENTITIES[B].sign_head("another federation", 99, digest("x")),
    ],
)
def test_a_head_without_the_peers_signature_is_refused(
    sites: dict[PeerName, JournalSite], head: SignedHead
) -> None:
    held = sites[A].witnesses.held(B)
    if head.seq >= 0:
        with pytest.raises(PeerMisbehaved) as caught:
            sites[A].witnesses.hold(B, head, KEYS[B])
        assert caught.value.reason is Reason.SIGNATURE
    else:
        assert sites[A].witnesses.hold(B, head, KEYS[B]) is None
    assert sites[A].witnesses.held(B) == held
    # Nor do we believe that it is ours.
    assert sites[B].witnesses.claimed(A, head) is None


def test_a_restored_older_journal_is_detected_by_its_witnesses(
    sites: dict[PeerName, JournalSite], tmp_path: Path
) -> None:
    """The restored file verifies; only the peers know that there were more records."""
    a = sites[A]
    a.close()
    older = shutil.copytree(a.path.parent, tmp_path / "older")
    a.open()
    run_rounds(sites.values(), [3])
    a.close()
    shutil.copytree(older, a.path.parent, dirs_exist_ok=True)
    a.open()
    held = sites[B].witnesses.held(A)
    assert held is not None
    words = a.witnesses.claimed(B, held)
    assert words is not None
    assert f"site-b holds a signed head of record {held.seq}" in words
    assert "cut short" in words
    assert a.witnesses.claimed(B, held) is None, "once is enough"
    assert a.witnesses.claimed(C, held) is not None
    # It goes on from there, beyond that number: then the record there is another one.
    for round in (3, 4):
        a.seal(round)
        a.decide(round, [])
        a.commit(round)
    later = sites[C].witnesses.held(A)
    assert later is not None
    a.close()
    a.open()
    words = a.witnesses.claimed(C, later)
    assert words is not None
    assert "rewritten" in words


def test_the_head_of_a_replaced_journal_is_dropped(
    sites: dict[PeerName, JournalSite],
) -> None:
    witnesses = sites[A].witnesses
    witnesses.forget(B)
    assert witnesses.held(B) is None
    new = signed(B, 4, "the new journal")
    assert witnesses.hold(B, new, KEYS[B]) is None
    assert witnesses.held(B) == new


def test_a_stored_head_becomes_durable_with_the_next_record(
    sites: dict[PeerName, JournalSite],
) -> None:
    a = sites[A]
    newer = signed(B, 500, "newer")
    a.witnesses.hold(B, newer, KEYS[B])
    length = a.round_journal.length
    a.close()
    a.open()  # its start is a record of the next life
    assert a.witnesses.held(B) != newer
    assert a.round_journal.length == length + 1
    a.witnesses.hold(B, newer, KEYS[B])
    a.seal(3)
    a.close()
    a.open()
    assert a.witnesses.held(B) == newer
