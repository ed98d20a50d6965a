"""Reports about third sites and about the receiver's own past: believed only if signed."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from lightyear_node.errors import PeerMisbehaved
from lightyear_node.node.gossip import UNSOUND_MAX
from lightyear_node.protocol.events import Accused, Announced, Answered, Reported
from lightyear_node.types import (
    Announcement,
    Digest,
    Evidence,
    Opinion,
    PeerName,
    Reason,
    Round,
    SignedManifest,
)
from tests.unit.node.test_gossip import IDENTITIES, Side, Wire, contact

A, B, C = (PeerName(name) for name in IDENTITIES)


def hears(side: Side, by: PeerName, **fields: object) -> None:
    announcement = Announcement(1, Round(4), "training", None, boot_id="one")
    asyncio.run(side.gossip.announce(by, replace(announcement, **fields)))  # type: ignore[arg-type]


def test_reports_of_a_third_site_carry_its_own_signature() -> None:
    a, b, c = Side("site-a"), Side("site-b"), Side("site-c")
    theirs = c.seal()
    contact(b, c)
    b.saying = replace(b.saying, vouched=(theirs.manifest.update,))
    contact(a, b)
    assert Reported(B, (theirs.manifest.update,)) in a.events
    assert a.manifests.find(theirs.manifest.update) == theirs


def test_only_recorded_updates_are_reported() -> None:
    a, b, c = Side("site-a"), Side("site-b"), Side("site-c")
    c.seal()
    contact(b, c)
    contact(a, b)
    assert not [event for event in a.events if isinstance(event, Reported)]


def test_reports_without_a_valid_signature_are_ignored_without_blame() -> None:
    a, c = Side("site-a"), Side("site-c")
    signed = c.seal()
    forged = replace(signed, signature=bytes(64))
    foreign = IDENTITIES["site-b"].sign_manifest(replace(signed.manifest, lamport=9))
    hears(a, B, seen=(forged, foreign))
    assert not [event for event in a.events if isinstance(event, Reported)]
    assert not any(a.refusals("site-b", reason) for reason in Reason)


def test_checking_stops_after_a_few_forged_manifests(monkeypatch: pytest.MonkeyPatch) -> None:
    a, c = Side("site-a"), Side("site-c")
    checked: list[SignedManifest] = []
    refusal = a.manifests.refusal

    def counting(signed: SignedManifest) -> tuple[Reason, str] | None:
        checked.append(signed)
        return refusal(signed)

    monkeypatch.setattr(a.manifests, "refusal", counting)
    forged = [replace(c.seal(round), signature=bytes(64)) for round in range(100)]
    hears(a, B, seen=tuple(forged))
    assert len(checked) == UNSOUND_MAX


def test_evidence_counts_if_signed_and_contradictory() -> None:
    a, c = Side("site-a"), Side("site-c")
    first, second = c.seal_variant(4, "1"), c.seal_variant(4, "2")
    hears(a, B, evidence=(Evidence(first, second),))
    assert a.events[-1] == Accused(first.manifest.update, second.manifest.update)
    assert a.manifests.proof(first.manifest.update, second.manifest.update) == Evidence(
        first, second
    )


def test_evidence_that_proves_nothing_is_ignored() -> None:
    a, c = Side("site-a"), Side("site-c")
    first, later, second = c.seal_variant(4, "1"), c.seal_variant(5, "2"), c.seal_variant(4, "2")
    forged = replace(second, signature=first.signature)
    for proof in (Evidence(first, first), Evidence(first, later), Evidence(first, forged)):
        hears(a, B, evidence=(proof,))
    assert not [event for event in a.events if isinstance(event, Accused)]


def test_a_proof_against_this_site_is_reported_once() -> None:
    a = Side("site-a")
    proof = Evidence(a.seal_variant(4, "1"), a.seal_variant(4, "2"))
    hears(a, B, evidence=(proof,))
    hears(a, B, evidence=(proof,))
    assert a.log.getvalue().count("two different updates of round 4 with our signature") == 1


def test_a_greeting_answer_returns_the_callers_newest_manifest() -> None:
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


def test_a_greeting_carries_the_callees_newest_manifest() -> None:
    a, b = Side("site-a"), Side("site-b")
    ours = a.seal(9)
    contact(a, b)
    reborn = Side("site-a", boot_id="later")
    contact(b, reborn)
    assert Reported(B, (ours.manifest.update,)) in reborn.events


def test_an_update_without_our_signature_is_not_ours() -> None:
    a, b, c = Side("site-a"), Side("site-b"), Side("site-c")
    ours = a.seal(9)
    forged = replace(ours, signature=c.seal(9).signature)

    class Lying(Wire):
        async def hello(self, hello):  # type: ignore[no-untyped-def]
            return replace(await super().hello(hello), yours=forged)

    asyncio.run(a.gossip.contact(B, Lying(a, b)))
    assert a.events[0] == Answered(B)


def test_the_older_of_two_nodes_with_one_key_is_refused() -> None:
    a = Side("site-a")
    hears(a, B, boot_id="first")
    hears(a, B, boot_id="second")  # a restart
    with pytest.raises(PeerMisbehaved, match="another node is running with its keys") as caught:
        hears(a, B, boot_id="first")
    # The operator over there reads about its own keys.
    assert caught.value.message_for_peer.startswith("another node is running with our keys")
    hears(a, B, boot_id="second")
    assert a.refusals("site-b", Reason.IDENTITY) == 1


def test_endless_restarts_use_bounded_memory() -> None:
    a = Side("site-a")
    for boot in range(100):
        hears(a, B, boot_id=str(boot))
    # Only recent starts are recognized: an older one counts as new again.
    with pytest.raises(PeerMisbehaved):
        hears(a, B, boot_id="98")
    hears(a, B, boot_id="0")


def test_differing_federation_configs_are_reported_on_both_sides() -> None:
    ours = {"rounds": "1" * 16, "rule.tau": "2" * 16, "peers.site-d": "3" * 16}
    theirs = {"rounds": "1" * 16, "rule.tau": "4" * 16, "peers.site-e": "3" * 16}
    a = Side("site-a")
    b = Side("site-b", agreement=Digest("2" * 64))
    for side, clauses in ((a, ours), (b, theirs)):
        side.facts = replace(side.facts, clauses=clauses)
        side.gossip.reconfigure(side.facts.agreement, clauses)
    contact(a, b)
    assert "`rule.tau` is not the same" in a.log.getvalue()
    assert "site-d is only in ours, site-e is only in its copy" in a.log.getvalue()
    assert "site-e is only in ours, site-d is only in its copy" in b.log.getvalue()
    assert "rule.tau" in a.observer.peers[B].differs
    assert "rounds" not in a.log.getvalue()
    assert any(isinstance(event, Answered) for event in a.events), "they go on together"
    assert not [event for event in a.events if isinstance(event, Announced)]


def test_journal_heads_are_exchanged_in_both_directions() -> None:
    a, b = Side("site-a"), Side("site-b")
    ours = a.identity.sign_head("ward", 7, Digest("7" * 64))
    a.saying = replace(a.saying, head=ours)
    contact(a, b)
    assert b.peer_memory.heads == {A: ours}
    reborn = Side("site-a", boot_id="later")
    contact(reborn, b)
    assert reborn.peer_memory.claims == [ours], "what others hold of us we hear when we meet"


def test_a_shared_verdict_counts_only_for_announced_updates() -> None:
    a, b = Side("site-a"), Side("site-b")
    ours = a.seal()
    opinion = Opinion(Round(4), ours.manifest.update.digest, False, "too_far")
    b.peer_memory.opinion = opinion
    contact(a, b)
    assert a.peer_memory.opinions == [opinion]
    b.peer_memory.opinion = replace(opinion, digest=Digest("8" * 64))
    contact(a, b)
    assert a.peer_memory.opinions == [opinion]
