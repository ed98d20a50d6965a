"""Gossip between sites without a network: each call is passed on directly."""

from __future__ import annotations

import asyncio
import io
import logging
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from lightyear_node.errors import PeerUnreachable
from lightyear_node.identity.keys import Certificate, Identity, make_identity, signing_keys
from lightyear_node.node.gossip import OWN_UPDATES_KEPT, Gossip, LocalFacts, LocalState
from lightyear_node.observe.metrics import Metrics
from lightyear_node.observe.observer import Observer
from lightyear_node.observe.peer_status import PeerStatus
from lightyear_node.protocol.events import Announced, Answered, Event, Heard
from lightyear_node.protocol.manifests import ManifestStore
from lightyear_node.protocol.parameters import Phase
from lightyear_node.types import (
    ROUND_MAX,
    Announcement,
    Digest,
    Generation,
    Hello,
    Manifest,
    Opinion,
    PeerName,
    Reason,
    Round,
    SignedHead,
    SignedManifest,
    Update,
)
from tests.support.tls_sites import GRID

NOW = datetime.now(UTC)
IDENTITIES = {name: make_identity(name, NOW) for name in ("site-a", "site-b", "site-c")}
SCHEMA, MODEL = Digest("5" * 64), Digest("6" * 64)
B = PeerName("site-b")
AT_WORK = ("training", 7)


class FakePeerMemory:
    """Stores what it receives; returns nothing by itself."""

    def __init__(self) -> None:
        self.heads: dict[PeerName, SignedHead] = {}
        self.claims: list[SignedHead] = []
        self.opinions: list[Opinion] = []
        self.opinion: Opinion | None = None

    def opinion_of(self, peer: PeerName) -> Opinion | None:
        return self.opinion

    def store_opinion(self, peer: PeerName, opinion: Opinion) -> None:
        self.opinions.append(opinion)

    def head_of(self, peer: PeerName) -> SignedHead | None:
        return self.heads.get(peer)

    def hold(self, peer: PeerName, head: SignedHead) -> None:
        self.heads[peer] = head

    def claimed(self, peer: PeerName, head: SignedHead) -> None:
        self.claims.append(head)


class Side:
    """One site's gossip and the events that it emitted."""

    def __init__(self, name: str, **changed: str | bytes | int) -> None:
        self.identity: Identity = IDENTITIES[name]
        self.log = io.StringIO()
        logger = logging.Logger(name)
        logger.addHandler(logging.StreamHandler(self.log))
        others = [PeerName(other) for other in IDENTITIES if other != name]
        metrics = Metrics(others, list(Phase), "0", 1)
        self.observer = Observer(metrics, logger, others, 0.6)
        self.events: list[Event] = []
        self.latest: SignedManifest | None = None
        facts = LocalFacts(
            us=PeerName(name),
            federation="ward",
            agreement=Digest("1" * 64),
            schema=SCHEMA,
            initial_model=MODEL,
            grid=GRID,
            boot_id=f"boot-{name}",
        )
        self.facts = replace(facts, **changed)  # type: ignore[arg-type]

        async def offer(peer: PeerName, digest: Digest) -> None:
            return None

        self.saying = LocalState(Round(4), "training", None, progress=7, stamp=1)
        self.manifests = ManifestStore(
            signing_keys({PeerName(n): (i.certificate,) for n, i in IDENTITIES.items()}),
            federation=self.facts.federation,
            schema=self.facts.schema,
            raw_bytes=self.facts.grid.raw_bytes,
            dtype=self.facts.dtype,
        )
        self.peer_memory = FakePeerMemory()
        self.gossip = Gossip(
            self.facts,
            self.manifests,
            self.observer,
            self.peer_memory,
            state=lambda: replace(self.saying, latest=self.latest),
            emit=self.tell,
            offer=offer,
            wall_ns=lambda: 0,
        )

    def tell(self, event: Event, *proofs: SignedManifest) -> None:
        """What the event loop does before its barrier handles an event."""
        self.manifests.keep(proofs)
        self.events.append(event)

    def seal(self, round: int = 4, **changed: object) -> SignedManifest:
        digest = Digest(f"{self.identity.name[-1]}{round:063x}")
        update = Update(self.identity.name, Generation(0), Round(round), digest)
        manifest = Manifest("ward", update, 1, SCHEMA, GRID.raw_bytes, 10)
        self.latest = self.identity.sign_manifest(replace(manifest, **changed))  # type: ignore[arg-type]
        return self.latest

    def seal_variant(self, round: int, variant: str) -> SignedManifest:
        """One of several updates that this site signs for a round."""
        update = Update(self.identity.name, Generation(0), Round(round), Digest(variant * 64))
        return self.seal(round, update=update)

    def agree(self, agreement: str, pins: dict[PeerName, tuple[Certificate, ...]]) -> None:
        self.facts = replace(self.facts, agreement=Digest(agreement * 64))
        self.manifests.set_keys(signing_keys(pins))
        self.gossip.reconfigure(self.facts.agreement, self.facts.clauses)

    def refusals(self, peer: str, reason: Reason) -> float | None:
        """The count; None for a site that is not a member."""
        labels = {"peer": peer, "reason": reason}
        registry = self.observer.metrics.registry
        return registry.get_sample_value("lightyear_peer_refusals_total", labels)


class Wire:
    """Calls from one side to another, without a network."""

    def __init__(self, caller: Side, callee: Side) -> None:
        self.caller, self.callee = caller.identity.name, callee.gossip

    async def hello(self, hello: Hello) -> Hello:
        return await self.callee.hello(self.caller, hello)

    async def announce(self, announcement: Announcement) -> Announcement:
        return await self.callee.announce(self.caller, announcement)


def contact(caller: Side, callee: Side) -> None:
    asyncio.run(caller.gossip.contact(callee.identity.name, Wire(caller, callee)))


def test_one_call_informs_both_sides() -> None:
    a, b = Side("site-a"), Side("site-b")
    ours, theirs = a.seal(), b.seal()
    contact(a, b)
    assert a.events == [Answered(B), Announced(theirs.manifest.update, *AT_WORK)]
    assert b.events == [Heard(a.identity.name), Announced(ours.manifest.update, *AT_WORK)]
    assert a.manifests.find(theirs.manifest.update) == theirs
    assert a.observer.peers[B].state == "reachable"


def test_the_greeting_is_sent_once_and_again_after_a_failure() -> None:
    a, b = Side("site-a"), Side("site-b")
    contact(a, b)
    contact(a, b)
    assert a.events == [Answered(B), Heard(B, *AT_WORK), Heard(B, *AT_WORK)]

    class Cut(Wire):
        async def announce(self, announcement: Announcement) -> Announcement:
            raise PeerUnreachable(B, Reason.UNREACHABLE, "connection refused")

    asyncio.run(a.gossip.contact(B, Cut(a, b)))
    assert a.observer.peers[B].state == "unreachable"
    contact(a, b)
    assert a.events[3:] == [Answered(B), Heard(B, *AT_WORK)]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"federation": "another"}, Reason.FEDERATION),
        ({"schema": Digest("7" * 64)}, Reason.SCHEMA_MISMATCH),
    ],
)
def test_incompatible_sites_refuse_each_other(changed: dict[str, str], reason: Reason) -> None:
    a, b = Side("site-a"), Side("site-b", **changed)
    contact(a, b)
    assert a.observer.peers[B].state == "refused"
    assert b.observer.peers[PeerName("site-a")].state == "refused"
    assert b.refusals("site-a", reason) == 1
    assert a.refusals("site-b", reason) == 1
    assert not a.events
    assert not b.events


@pytest.mark.parametrize(
    "changed",
    [{}, {"federation": "another"}, {"schema": Digest("7" * 64)}, {"agreement": Digest("2" * 64)}],
)
def test_a_probe_is_answered_whatever_differs_and_leaves_no_trace(
    changed: dict[str, str],
) -> None:
    a, b = Side("site-a"), Side("site-b", **changed)
    # Nothing in it counts: neither a version from the future nor a stamp at the end of time.
    question = replace(
        b.gossip.greeting(a.identity.name, probe=True),
        federation="ward",
        lamport=2**60,
        schema=SCHEMA,
        version_min=7,
        version_max=9,
        boot_id="check",
    )
    answer = asyncio.run(b.gossip.hello(a.identity.name, question))
    assert answer.probe
    assert (answer.federation, answer.schema) == (b.facts.federation, b.facts.schema)
    assert answer.agreement == b.facts.agreement
    assert answer.lamport == 1
    assert not b.events
    assert not b.log.getvalue()
    assert b.observer.peers[PeerName("site-a")] == PeerStatus()
    assert not any(b.refusals("site-a", reason) for reason in Reason)
    # The first real greeting is still the first.
    contact(a, b)
    assert bool(b.events) == (not changed or "agreement" in changed)


def test_harmless_differences_are_reported_once() -> None:
    a = Side("site-a")
    b = Side("site-b", agreement=Digest("2" * 64), initial_model=Digest("9" * 64))
    contact(a, b)
    contact(a, b)
    assert a.log.getvalue().count("its peers.yaml says something else") == 1
    assert a.log.getvalue().count("started from other weights") == 1
    assert a.events[0] == Answered(B)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"federation": "another"}, Reason.FEDERATION),
        ({"schema": Digest("7" * 64)}, Reason.SCHEMA_MISMATCH),
        ({"raw_bytes": 999_999_999}, Reason.TOO_LARGE),
    ],
)
def test_an_invalid_manifest_is_refused_and_counted(
    changed: dict[str, object], reason: Reason
) -> None:
    a, b = Side("site-a"), Side("site-b")
    signed = b.seal(**changed)
    contact(a, b)
    assert a.refusals("site-b", reason) == 1
    assert a.manifests.find(signed.manifest.update) is None
    assert not any(isinstance(event, Announced) for event in a.events)


def test_manifests_in_another_name_or_with_another_signature_are_refused() -> None:
    a, b, c = Side("site-a"), Side("site-b"), Side("site-c")
    b.latest = c.seal()
    contact(a, b)
    assert a.refusals("site-b", Reason.IDENTITY) == 1
    forged = replace(c.seal().manifest, update=b.seal().manifest.update)
    b.latest = c.identity.sign_manifest(forged)
    contact(a, b)
    assert a.refusals("site-b", Reason.SIGNATURE) == 1
    assert not any(isinstance(event, Announced) for event in a.events)


def test_our_own_update_under_a_peers_name_is_an_echo() -> None:
    a, b = Side("site-a"), Side("site-b")
    for round in range(OWN_UPDATES_KEPT):
        ours = a.seal(round)
        contact(a, b)
    for copied in (ours, a.seal(0)):
        b.seal(OWN_UPDATES_KEPT)
        assert b.latest is not None
        manifest = b.latest.manifest
        update = replace(manifest.update, digest=copied.manifest.update.digest)
        b.latest = b.identity.sign_manifest(replace(manifest, update=update))
        contact(a, b)
    assert a.refusals("site-b", Reason.ECHO) == 2
    assert not any(isinstance(event, Announced) for event in a.events)


def test_no_stamp_of_a_peer_is_refused_or_followed() -> None:
    a = Side("site-a")
    for stamp in (2**40, 2**41, ROUND_MAX):
        announcement = Announcement(stamp, Round(0), "training", None)
        answer = asyncio.run(a.gossip.announce(B, announcement))
        assert answer.lamport == 1
    assert a.observer.peers[B].state == "reachable"
    assert not any(a.refusals("site-b", reason) for reason in Reason)


def pins_of(*names: str) -> dict[PeerName, tuple[Certificate, ...]]:
    return {PeerName(name): (IDENTITIES[name].certificate,) for name in names}


def test_messages_of_a_removed_peer_that_were_in_flight_are_refused() -> None:
    a, b = Side("site-a"), Side("site-b")
    theirs = b.seal()
    contact(a, b)
    before = len(a.events)
    a.agree("1", pins_of("site-a", "site-c"))
    assert a.manifests.find(theirs.manifest.update) is None
    a.observer.reconfigured("site-b is removed", 0.0, [PeerName("site-c")])
    # It may call us, or answer a call of ours that began before.
    contact(b, a)
    contact(a, b)
    assert len(a.events) == before
    assert a.manifests.find(theirs.manifest.update) is None
    assert a.refusals("site-b", Reason.IDENTITY) is None, "it is not counted any more"
    assert a.observer.peers[B].state == "removed", "its last words do not change that"


def test_a_withdrawn_signing_key_proves_nothing() -> None:
    a, b = Side("site-a"), Side("site-b")
    theirs = b.seal()
    contact(a, b)
    another = {**pins_of("site-a", "site-c"), B: (make_identity(B, NOW).certificate,)}
    a.agree("1", another)
    assert a.manifests.find(theirs.manifest.update) is None
    contact(a, b)
    assert a.refusals("site-b", Reason.SIGNATURE) == 1


def test_a_renewed_certificate_with_the_same_signing_key_keeps_manifests() -> None:
    a, b = Side("site-a"), Side("site-b")
    theirs = b.seal()
    contact(a, b)
    renewed = make_identity(B, NOW, IDENTITIES[B].signing_key)
    a.agree("1", {**pins_of("site-a"), B: (renewed.certificate,)})
    assert a.manifests.find(theirs.manifest.update) == theirs
    contact(a, b)
    assert a.observer.peers[B].state == "reachable"


def test_a_new_federation_config_is_compared_once_by_every_peer() -> None:
    a, b = Side("site-a"), Side("site-b")
    contact(a, b)
    differs = "its peers.yaml says something else"
    a.agree("2", pins_of(*IDENTITIES))
    contact(a, b)
    contact(b, a)
    contact(b, a)
    assert (a.log.getvalue().count(differs), b.log.getvalue().count(differs)) == (1, 1)
    # As soon as both have the same file again, there is nothing to say.
    b.agree("2", pins_of(*IDENTITIES))
    contact(b, a)
    contact(a, b)
    assert (a.log.getvalue().count(differs), b.log.getvalue().count(differs)) == (1, 1)
