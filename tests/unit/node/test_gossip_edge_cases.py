"""The exact limits of gossip, and which manifests are kept."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from unittest.mock import Mock

import pytest

from lightyear_node.errors import DamagedFile, PeerMisbehaved, PeerRefusedUs, PeerUnreachable
from lightyear_node.node.gossip import Gossip, LocalState
from lightyear_node.observe.metrics import SENT
from lightyear_node.observe.observer import Observer
from lightyear_node.observe.peer_status import PeerStatusTable
from lightyear_node.protocol import manifests as archive_module
from lightyear_node.protocol.events import Answered, Heard, Reported
from lightyear_node.types import (
    Announcement,
    Digest,
    Evidence,
    PeerName,
    Reason,
    Round,
    SignedManifest,
    Transfer,
    Update,
)
from tests.unit.node.test_gossip import IDENTITIES, B, Side, Wire, contact, pins_of

A, C = PeerName("site-a"), PeerName("site-c")


def hears(side: Side, by: PeerName, **fields: object) -> Announcement:
    announcement = Announcement(1, Round(0), "training", None)
    return asyncio.run(side.gossip.announce(by, replace(announcement, **fields)))  # type: ignore[arg-type]


# Calls.


def test_a_greeting_states_the_supported_protocol_version() -> None:
    a = Side("site-a")
    fields = asyncio.run(a.gossip.hello(B, Side("site-b").gossip.greeting(A)))
    assert (fields.version_min, fields.version_max) == (1, 1)


def test_new_settings_cause_new_greetings() -> None:
    a, b = Side("site-a"), Side("site-b")
    contact(a, b)
    a.agree("1", pins_of(*IDENTITIES))
    contact(a, b)
    assert a.events.count(Answered(B)) == 2


@pytest.mark.parametrize(
    ("problem", "state"), [(PeerRefusedUs, "refused"), (PeerUnreachable, "unreachable")]
)
def test_peers_that_refuse_or_are_unreachable_are_greeted_again(
    problem: type[PeerRefusedUs | PeerUnreachable], state: str
) -> None:
    a, b = Side("site-a"), Side("site-b")
    contact(a, b)

    class Broken(Wire):
        async def announce(self, announcement: Announcement) -> Announcement:
            raise problem(B, Reason.FEDERATION, "it does not like us")

    asyncio.run(a.gossip.contact(B, Broken(a, b)))
    assert a.observer.peers[B].state == state
    assert "it does not like us" in a.log.getvalue()
    assert "site-b: it does not" not in a.log.getvalue(), "the name is printed once, elsewhere"
    contact(a, b)
    assert a.events.count(Answered(B)) == 2


def test_the_last_announcement_of_a_removed_peer_is_refused() -> None:
    a = Side("site-a")
    a.agree("1", pins_of("site-a", "site-c"))
    with pytest.raises(PeerMisbehaved, match="no longer in our"):
        hears(a, B)
    assert not a.events


def test_served_and_failed_transfers_are_counted() -> None:
    a = Side("site-a")
    observer = Mock(spec=Observer, peers=Mock(spec=PeerStatusTable))

    async def offer(peer: PeerName, digest: Digest) -> object:
        return (peer, digest)

    gossip = Gossip(
        a.facts,
        a.manifests,
        observer,
        a.peer_memory,
        state=lambda: a.saying,
        emit=a.tell,
        offer=offer,  # type: ignore[arg-type]
        wall_ns=lambda: 0,
    )
    digest, transfer = Digest("1" * 64), Transfer(3, 2, 1.0)
    assert asyncio.run(gossip.offer(B, digest)) == (B, digest)
    gossip.upload_finished(B, transfer)
    observer.peers.transferred.assert_called_once_with(B, SENT, transfer)
    gossip.upload_failed(B, Reason.UNREACHABLE)
    observer.peers.sending_failed.assert_called_once_with(B, Reason.UNREACHABLE)
    gossip.denied("handshake", None)
    observer.peers.denied.assert_called_once_with(None, "handshake")
    gossip.strangers_closed(3)
    observer.connections_closed.assert_called_once_with(3)
    gossip.damaged(DamagedFile("weights are damaged"))
    observer.damaged.assert_called_once_with("own", "weights are damaged")


# What is known again, and for how long.


def copies(side: Side, number: int) -> Announcement:
    """B announces update `number` of A as its own."""
    b = Side("site-b")
    manifest = b.seal(1000 + number).manifest
    stolen = replace(manifest.update, digest=Digest(f"a{number:063x}"))
    return hears(side, B, latest=b.identity.sign_manifest(replace(manifest, update=stolen)))


def test_our_newest_64_updates_are_recognised_under_any_name() -> None:
    a = Side("site-a")
    for number in range(65):
        a.seal(number)
        for _ in range(3):  # heartbeats
            hears(a, B)
    copies(a, 0)
    for number in (1, 2, 64):
        with pytest.raises(PeerMisbehaved):
            copies(a, number)


def test_the_last_8_starts_of_a_peer_are_recognised() -> None:
    a = Side("site-a")
    for number in range(8):
        hears(a, B, boot_id=f"boot {number}")
    with pytest.raises(PeerMisbehaved):
        hears(a, B, boot_id="boot 0")
    hears(a, B, boot_id="boot 8")
    with pytest.raises(PeerMisbehaved):
        hears(a, B, boot_id="boot 1")
    hears(a, B, boot_id="boot 0")


def test_a_message_without_a_boot_id_is_not_a_start() -> None:
    a = Side("site-a")
    for boot in ("one", "", "one", ""):
        hears(a, B, boot_id=boot)
    assert len(a.events) == 4


def test_a_third_sites_update_is_not_taken_for_ours() -> None:
    a, b, c = Side("site-a"), Side("site-b"), Side("site-c")
    greeting = replace(b.gossip.greeting(A), yours=c.seal())
    asyncio.run(a.gossip.hello(B, greeting))
    assert a.events == [Heard(B)]


@pytest.mark.parametrize(("unsound", "heard"), [(7, True), (8, False)])
def test_after_8_invalid_manifests_the_rest_is_ignored(unsound: int, heard: bool) -> None:
    a, c = Side("site-a"), Side("site-c")
    forged = tuple(replace(c.seal(number), signature=bytes(64)) for number in range(unsound))
    sound = c.seal(99)
    hears(a, B, seen=(*forged, sound))
    assert a.events[1:] == ([Reported(B, (sound.manifest.update,))] if heard else [])


def test_missing_progress_counts_as_none() -> None:
    a = Side("site-a")
    a.saying = LocalState(Round(4), "training", None)
    assert hears(a, B).progress == 0


def test_updates_without_a_kept_manifest_are_not_reported() -> None:
    a, c = Side("site-a"), Side("site-c")
    held, lost = c.seal(1), c.seal(2)
    a.manifests.keep([held])
    updates = (lost.manifest.update, held.manifest.update)
    a.saying = LocalState(Round(4), "training", None, vouched=updates)
    assert hears(a, B).seen == (held,)


# Differing settings.


def differences(ours: dict[str, str], theirs: dict[str, str]) -> str:
    a = Side("site-a", clauses=ours)  # type: ignore[arg-type]
    b = Side("site-b", clauses=theirs, agreement=Digest("2" * 64))  # type: ignore[arg-type]
    contact(a, b)
    [line] = [line for line in a.log.getvalue().splitlines() if "its peers.yaml" in line]
    return line.partition("its peers.yaml ")[2]


def settings(number: int, value: str) -> dict[str, str]:
    return {f"key{index}": value for index in range(number)}


@pytest.mark.parametrize("number", [1, 8])
def test_up_to_8_differing_settings_are_named_in_order(number: int) -> None:
    named = ", ".join(f"`key{index}` is not the same" for index in range(number))
    same = {"key9": "same"}
    ours, theirs = settings(number, "1") | same, settings(number, "2") | same
    assert differences(ours, theirs) == f"differs from ours: {named}"


def test_further_differing_settings_are_counted() -> None:
    named = ", ".join(f"`key{index}` is not the same" for index in range(8))
    text = differences(settings(9, "1"), settings(9, "2"))
    assert text == f"differs from ours: {named}, and 1 more"


def test_settings_of_one_side_only_are_named_in_order() -> None:
    other = {"other": "1"}
    only_ours = ", ".join(f"`key{index}` is only in ours" for index in range(7))
    text = differences(settings(7, "1"), other)
    assert text == f"differs from ours: {only_ours}, `other` is only in its copy"
    only_theirs = ", ".join(f"`key{index}` is only in its copy" for index in range(7))
    text = differences(other, settings(7, "1"))
    assert text == f"differs from ours: `other` is only in ours, {only_theirs}"


@pytest.mark.parametrize("theirs", [{}, {"key0": "1"}])
def test_no_difference_is_named_where_none_is_known(theirs: dict[str, str]) -> None:
    assert differences({"key0": "1"}, theirs) == "says something else than ours"


# The manifest store.


def test_signing_keys_are_known_for_members_only() -> None:
    a = Side("site-a")
    assert a.manifests.keys_of(B) == (IDENTITIES["site-b"].certificate.signing_key,)
    assert a.manifests.keys_of(PeerName("site-x")) == ()


def test_the_newest_4096_manifests_are_not_verified_again(monkeypatch: pytest.MonkeyPatch) -> None:
    verified: list[Round] = []

    def refusal(signed: SignedManifest, **options: object) -> None:
        verified.append(signed.manifest.update.round)

    monkeypatch.setattr(archive_module, "refusal", refusal)
    a, one = Side("site-a"), Side("site-b").seal()

    def check(number: int) -> None:
        update = replace(one.manifest.update, round=Round(number))
        a.manifests.refusal(replace(one, manifest=replace(one.manifest, update=update)))

    for number in range(4096):
        check(number)
        check(number)
    check(0)
    assert verified == list(range(4096))
    check(4096)
    check(1)
    check(4096)
    assert verified[4096:] == [4096]
    check(0)
    assert verified[4096:] == [4096, 0]


def test_only_the_first_valid_manifest_of_an_update_is_kept() -> None:
    a, b = Side("site-a"), Side("site-b")
    first, second = b.seal(1), b.seal(1, samples=11)
    forged = replace(b.seal(2), signature=bytes(64))
    assert first.manifest.update == second.manifest.update
    a.manifests.keep([forged, first])
    a.manifests.keep([second, b.seal(3)])
    assert a.manifests.find(first.manifest.update) == first
    assert not a.manifests.holds(forged.manifest.update)
    assert len(a.manifests) == 2


def test_unused_manifests_are_dropped_beyond_twice_the_used_ones_plus_64() -> None:
    a, b = Side("site-a"), Side("site-b")
    numbers = iter(range(1000))

    def kept_until_full() -> list[Update]:
        updates: list[Update] = []
        full = False
        while not full:
            signed = b.seal(next(numbers))
            full = a.manifests.keep([signed])
            updates.append(signed.manifest.update)
        return updates

    first = kept_until_full()
    assert len(first) == 64 + 1
    a.manifests.retain(first[:10])
    assert len(a.manifests) == 10
    assert 10 + len(kept_until_full()) == 2 * 10 + 64 + 1


def test_a_proof_needs_two_manifests() -> None:
    a, b = Side("site-a"), Side("site-b")
    one, other = b.seal_variant(1, "1"), b.seal_variant(1, "2")
    updates: tuple[Update, Update] = (one.manifest.update, other.manifest.update)
    a.manifests.keep([one])
    assert a.manifests.proof(*updates) is None
    assert a.manifests.proof(*reversed(updates)) is None
    a.manifests.keep([other])
    assert a.manifests.proof(*updates) == Evidence(one, other)
    assert a.manifests.proof(*reversed(updates)) == Evidence(other, one)
