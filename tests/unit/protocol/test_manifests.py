"""The manifest store beside its barrier: every contradiction can be proven, in bounded memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from lightyear_node.identity.keys import make_identity
from lightyear_node.protocol.durable_state import DurableState
from lightyear_node.protocol.events import Accuse, Answered, Command, Event, Unquarantined
from lightyear_node.protocol.manifests import SPARE_MANIFESTS
from lightyear_node.protocol.parameters import Parameters
from lightyear_node.protocol.peer_table import EVIDENCE_ROUNDS
from lightyear_node.protocol.record_quota import STOCK
from lightyear_node.protocol.state_machine import Barrier
from lightyear_node.types import Announcement, Evidence, Generation, PeerName, Round, SignedManifest
from tests.unit.node.test_gossip import IDENTITIES, NOW, Side, pins_of

A, B, C = (PeerName(name) for name in IDENTITIES)


class Site(Side):
    """A site's gossip, manifest store and barrier, connected as in the event loop."""

    def __init__(self, name: str, round: int = 0) -> None:
        super().__init__(name)
        others = frozenset(PeerName(other) for other in IDENTITIES if other != name)
        parameters = Parameters(others, min_peers=1, faulty_max=0, rounds=10**6)
        memory = DurableState(Generation(0), Round(round))
        self.barrier = Barrier(PeerName(name), parameters, memory, provable=self.manifests.holds)
        self.commands: list[Command] = []
        self.barrier.start(0.0, 0)
        for peer in others:
            self.tell(Answered(peer))

    def tell(self, event: Event, *proofs: SignedManifest) -> None:
        if self.manifests.keep(proofs):
            self._handle(event)
            self.manifests.retain(self.barrier.referenced())
        else:
            self._handle(event)

    def _handle(self, event: Event) -> None:
        self.events.append(event)
        for command in self.barrier.handle(event, 0.0):
            self.commands.append(command)
            if isinstance(command, Accuse):
                assert self.manifests.proof(command.first, command.second) is not None

    def hears(self, by: PeerName, **fields: object) -> None:
        announcement = Announcement(1, Round(0), "training", None, boot_id="one")
        asyncio.run(self.gossip.announce(by, replace(announcement, **fields)))  # type: ignore[arg-type]

    @property
    def manifest_count(self) -> int:
        return len(self.manifests)


def test_evidence_older_than_all_stored_manifests_is_proven() -> None:
    a, c = Site("site-a", round=50), Side("site-c")
    old = Evidence(c.seal_variant(3, "1"), c.seal_variant(3, "2"))
    for round in range(40, 60):
        a.hears(C, latest=c.seal(round))
    a.hears(B, evidence=(old,))
    [accusation] = [one for one in a.commands if isinstance(one, Accuse)]
    assert {accusation.first, accusation.second} == {
        old.first.manifest.update,
        old.second.manifest.update,
    }


def test_an_update_known_from_a_third_site_is_proven_after_many_newer_ones() -> None:
    """B's report of C's round 1 stays in the barrier's table while C reaches round 40."""
    a, c = Site("site-a"), Side("site-c")
    a.hears(B, seen=(c.seal_variant(1, "1"),))
    for round in range(2, 40):
        a.hears(C, latest=c.seal(round))
    a.hears(C, latest=c.seal_variant(1, "2"))
    assert len([one for one in a.commands if isinstance(one, Accuse)]) == 1


@pytest.mark.parametrize("older", [0, 1])
def test_old_evidence_is_ignored(older: int) -> None:
    a, c = Site("site-a", round=500), Side("site-c")
    round = 500 - EVIDENCE_ROUNDS - older
    a.hears(B, evidence=(Evidence(c.seal_variant(round, "1"), c.seal_variant(round, "2")),))
    assert len([one for one in a.commands if isinstance(one, Accuse)]) == 1 - older


def test_signatures_of_a_withdrawn_key_are_no_evidence() -> None:
    """After a stolen key was replaced, its signatures must not count against the owner."""
    a, c = Site("site-a"), Side("site-c")
    a.hears(C, latest=c.seal_variant(4, "1"))
    renewed = make_identity(C, NOW)
    a.agree("1", {**pins_of("site-a", "site-b"), C: (renewed.certificate,)})
    second = renewed.sign_manifest(c.seal_variant(4, "2").manifest)
    a.hears(C, latest=second)
    assert not [one for one in a.commands if isinstance(one, Accuse)]


def test_a_flood_of_updates_takes_no_memory() -> None:
    a, c = Site("site-a"), Side("site-c")
    most = 0
    for round in range(300):
        signed = c.seal(round)
        a.hears(C, latest=signed)
        a.hears(B, seen=(signed,))
        most = max(most, a.manifest_count)
    assert most <= 2 * SPARE_MANIFESTS


def test_a_flood_of_evidence_takes_no_memory() -> None:
    a, c = Site("site-a"), Side("site-c")
    for round in range(300):
        a.hears(B, evidence=(Evidence(c.seal_variant(round, "1"), c.seal_variant(round, "2")),))
        a.tell(Unquarantined(C))
    assert a.manifest_count <= 2 * SPARE_MANIFESTS


def test_repeating_old_updates_does_not_push_out_the_newest() -> None:
    a, b = Site("site-a"), Side("site-b")
    newest = b.seal(100)
    a.hears(B, latest=newest)
    for round in range(10):
        a.hears(B, latest=b.seal(round))
    assert a.manifests.newest_of(B) == newest


def test_a_peer_that_jumps_ahead_causes_a_limited_number_of_records() -> None:
    a, c = Site("site-a"), Side("site-c")
    for round in range(200):
        a.hears(C, latest=c.seal(round))
    assert len(a.barrier.durable_state().vouched[C]) > 0
    assert a.barrier.withheld[C] > 200 - STOCK - 2
    assert a.barrier.withheld[B] == 0
