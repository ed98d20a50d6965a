"""What sites tell each other of third ones, and of one another's past: signed, or not believed."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from lightyear_node.barrier import Accused, Announced, Answered, Reported
from lightyear_node.conversation import UNSOUND_MAX
from lightyear_node.errors import PeerMisbehaved
from lightyear_node.records import (
    Announcement,
    Digest,
    Evidence,
    Opinion,
    PeerName,
    Reason,
    Round,
    SignedManifest,
)

from .test_conversation import IDENTITIES, Side, Wire, contact

A, B, C = (PeerName(name) for name in IDENTITIES)


def hears(side: Side, by: PeerName, **said: object) -> None:
    announcement = Announcement(1, Round(4), "training", None, boot_id="one")
    asyncio.run(side.conversation.announce(by, replace(announcement, **said)))  # type: ignore[arg-type]


def test_what_a_site_has_heard_of_a_third_it_tells_with_that_sites_own_signature() -> None:
    a, b, c = Side("site-a"), Side("site-b"), Side("site-c")
    theirs = c.seal()
    contact(b, c)
    b.saying = replace(b.saying, vouched=(theirs.manifest.update,))
    contact(a, b)
    assert Reported(B, (theirs.manifest.update,)) in a.events
    assert a.archive.find(theirs.manifest.update) == theirs


def test_what_it_does_not_vouch_for_it_does_not_tell() -> None:
    a, b, c = Side("site-a"), Side("site-b"), Side("site-c")
    c.seal()
    contact(b, c)
    contact(a, b)
    assert not [event for event in a.events if isinstance(event, Reported)]


def test_hearsay_without_a_sound_signature_is_ignored_and_nobody_is_blamed() -> None:
    a, c = Side("site-a"), Side("site-c")
    signed = c.seal()
    forged = replace(signed, signature=bytes(64))
    foreign = IDENTITIES["site-b"].sign_manifest(replace(signed.manifest, lamport=9))
    hears(a, B, seen=(forged, foreign))
    assert not [event for event in a.events if isinstance(event, Reported)]
    assert not any(a.refusals("site-b", reason) for reason in Reason)


def test_a_heap_of_forgeries_is_not_checked_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    a, c = Side("site-a"), Side("site-c")
    checked: list[SignedManifest] = []
    refusal = a.archive.refusal

    def counting(signed: SignedManifest, lamport: int) -> tuple[Reason, str] | None:
        checked.append(signed)
        return refusal(signed, lamport)

    monkeypatch.setattr(a.archive, "refusal", counting)
    forged = [replace(c.seal(round), signature=bytes(64)) for round in range(100)]
    hears(a, B, seen=tuple(forged))
    assert len(checked) == UNSOUND_MAX


def test_evidence_counts_if_it_is_signed_and_contradicts_itself() -> None:
    a, c = Side("site-a"), Side("site-c")
    first, second = c.story(4, "1"), c.story(4, "2")
    hears(a, B, evidence=(Evidence(first, second),))
    assert a.events[-1] == Accused(first.manifest.update, second.manifest.update)
    assert a.archive.proof(first.manifest.update, second.manifest.update) == Evidence(first, second)


def test_evidence_that_proves_nothing_is_ignored() -> None:
    a, c = Side("site-a"), Side("site-c")
    first, later, second = c.story(4, "1"), c.story(5, "2"), c.story(4, "2")
    forged = replace(second, signature=first.signature)
    for proof in (Evidence(first, first), Evidence(first, later), Evidence(first, forged)):
        hears(a, B, evidence=(proof,))
    assert not [event for event in a.events if isinstance(event, Accused)]


def test_a_proof_against_ourselves_is_said_aloud_once() -> None:
    a = Side("site-a")
    proof = Evidence(a.story(4, "1"), a.story(4, "2"))
    hears(a, B, evidence=(proof,))
    hears(a, B, evidence=(proof,))
    assert a.log.getvalue().count("two different updates of round 4 with our signature") == 1


def test_who_meets_us_learns_what_we_hold_of_it() -> None:
    a, b = Side("site-a"), Side("site-b")
    ours = a.seal(9)
    contact(a, b)
    # A new life of the same site, which remembers nothing.
    reborn = Side("site-a", boot_id="later")
    contact(reborn, b)
    assert reborn.events[0] == Answered(B, ours.manifest.update)
    again = Side("site-a", boot_id="latest")
    contact(b, again)
    assert Reported(B, ()) not in again.events, "b had greeted it before"


def test_a_greeting_tells_the_greeted_what_we_hold_of_it() -> None:
    a, b = Side("site-a"), Side("site-b")
    ours = a.seal(9)
    contact(a, b)
    reborn = Side("site-a", boot_id="later")
    contact(b, reborn)
    assert Reported(B, (ours.manifest.update,)) in reborn.events


def test_what_we_have_not_signed_is_not_ours() -> None:
    a, b, c = Side("site-a"), Side("site-b"), Side("site-c")
    ours = a.seal(9)
    forged = replace(ours, signature=c.seal(9).signature)

    class Lying(Wire):
        async def hello(self, hello):  # type: ignore[no-untyped-def]
            return replace(await super().hello(hello), yours=forged)

    asyncio.run(a.conversation.contact(B, Lying(a, b)))
    assert a.events[0] == Answered(B)


def test_two_nodes_with_one_key_are_told_apart_and_the_older_is_refused() -> None:
    a = Side("site-a")
    hears(a, B, boot_id="first")
    hears(a, B, boot_id="second")  # a restart
    with pytest.raises(PeerMisbehaved, match="two nodes run with its keys"):
        hears(a, B, boot_id="first")
    hears(a, B, boot_id="second")
    assert a.refusals("site-b", Reason.IDENTITY) == 1


def test_restarts_without_end_take_no_memory() -> None:
    a = Side("site-a")
    for boot in range(100):
        hears(a, B, boot_id=str(boot))
    assert len(a.conversation._boots[B]) < 20


def test_copies_of_the_agreement_that_differ_are_named_on_both_sides() -> None:
    ours = {"rounds": "1" * 16, "rule.tau": "2" * 16, "peers.site-d": "3" * 16}
    theirs = {"rounds": "1" * 16, "rule.tau": "4" * 16, "peers.site-e": "3" * 16}
    a = Side("site-a")
    b = Side("site-b", agreement=Digest("2" * 64))
    for side, clauses in ((a, ours), (b, theirs)):
        side.facts = replace(side.facts, clauses=clauses)
        side.conversation.agree(side.facts)
    contact(a, b)
    assert "`rule.tau` is not the same" in a.log.getvalue()
    assert "site-d is only in ours, site-e is only in its copy" in a.log.getvalue()
    assert "site-e is only in ours, site-d is only in its copy" in b.log.getvalue()
    assert "rule.tau" in a.observer.peers[B].differs
    assert "rounds" not in a.log.getvalue()
    assert any(isinstance(event, Answered) for event in a.events), "they go on together"
    assert not [event for event in a.events if isinstance(event, Announced)]


def test_heads_of_journals_travel_both_ways() -> None:
    a, b = Side("site-a"), Side("site-b")
    ours = a.identity.sign_head("ward", 7, Digest("7" * 64))
    a.saying = replace(a.saying, head=ours)
    contact(a, b)
    assert b.diary.heads == {A: ours}
    reborn = Side("site-a", boot_id="later")
    contact(reborn, b)
    assert reborn.diary.claims == [ours], "what others hold of us we hear when we meet"


def test_an_opinion_counts_only_about_what_we_have_announced() -> None:
    a, b = Side("site-a"), Side("site-b")
    ours = a.seal()
    opinion = Opinion(Round(4), ours.manifest.update.digest, False, "too_far")
    b.diary.opinion = opinion
    contact(a, b)
    assert a.diary.opinions == [opinion]
    b.diary.opinion = replace(opinion, digest=Digest("8" * 64))
    contact(a, b)
    assert a.diary.opinions == [opinion]
