"""What a node makes of its peers' words, without any network: two conversations, joined by hand."""

from __future__ import annotations

import asyncio
import io
import logging
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from lightyear_node.archive import Archive
from lightyear_node.barrier import Announced, Answered, Event, Heard, Phase
from lightyear_node.conversation import OWN_UPDATES_KEPT, Conversation, Facts, Saying
from lightyear_node.errors import PeerMisbehaved, PeerUnreachable
from lightyear_node.identity import Certificate, Identity, make_identity
from lightyear_node.observe.metrics import Metrics
from lightyear_node.observe.observer import Observer
from lightyear_node.observe.peers import PeerView
from lightyear_node.records import (
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

from .sites import GRID

NOW = datetime.now(UTC)
IDENTITIES = {name: make_identity(name, NOW) for name in ("site-a", "site-b", "site-c")}
SCHEMA, MODEL = Digest("5" * 64), Digest("6" * 64)
B = PeerName("site-b")
AT_WORK = ("training", 7)


class Diary:
    """Remembers what it was told, and has nothing to tell."""

    def __init__(self) -> None:
        self.heads: dict[PeerName, SignedHead] = {}
        self.claims: list[SignedHead] = []
        self.opinions: list[Opinion] = []
        self.opinion: Opinion | None = None

    def opinion_of(self, peer: PeerName) -> Opinion | None:
        return self.opinion

    def told(self, peer: PeerName, opinion: Opinion) -> None:
        self.opinions.append(opinion)

    def head_of(self, peer: PeerName) -> SignedHead | None:
        return self.heads.get(peer)

    def hold(self, peer: PeerName, head: SignedHead) -> None:
        self.heads[peer] = head

    def claimed(self, peer: PeerName, head: SignedHead) -> None:
        self.claims.append(head)


class Side:
    """One site's conversation and all that it passed on."""

    def __init__(self, name: str, **changed: str | bytes | int) -> None:
        self.identity: Identity = IDENTITIES[name]
        self.log = io.StringIO()
        logger = logging.Logger(name)
        logger.addHandler(logging.StreamHandler(self.log))
        others = [PeerName(other) for other in IDENTITIES if other != name]
        metrics = Metrics(others, list(Phase), "0", 1)
        self.observer = Observer(metrics, logger, {peer: PeerView() for peer in others}, 0.6)
        self.events: list[Event] = []
        self.latest: SignedManifest | None = None
        facts = Facts(
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

        self.saying = Saying(Round(4), "training", None, progress=7)
        self.archive = Archive(
            {PeerName(n): (i.certificate,) for n, i in IDENTITIES.items()},
            federation=self.facts.federation,
            schema=self.facts.schema,
            raw_bytes=self.facts.grid.raw_bytes,
            dtype=self.facts.dtype,
        )
        self.diary = Diary()
        self.conversation = Conversation(
            self.facts,
            self.archive,
            self.observer,
            self.diary,
            say=lambda: replace(self.saying, latest=self.latest),
            tell=self.events.append,
            offer=offer,
            wall_ns=lambda: 0,
            lamport=0,
        )

    def seal(self, round: int = 4, **changed: object) -> SignedManifest:
        digest = Digest(f"{self.identity.name[-1]}{round:063x}")
        update = Update(self.identity.name, Generation(0), Round(round), digest)
        manifest = Manifest("ward", update, 1, SCHEMA, GRID.raw_bytes, 10)
        self.latest = self.identity.sign_manifest(replace(manifest, **changed))  # type: ignore[arg-type]
        return self.latest

    def story(self, round: int, face: str) -> SignedManifest:
        """One of several updates that this site signs for a round."""
        update = Update(self.identity.name, Generation(0), Round(round), Digest(face * 64))
        return self.seal(round, update=update)

    def agree(self, agreement: str, pins: dict[PeerName, tuple[Certificate, ...]]) -> None:
        self.facts = replace(self.facts, agreement=Digest(agreement * 64))
        self.archive.agree(pins)
        self.conversation.agree(self.facts)

    def refusals(self, peer: str, reason: Reason) -> float | None:
        """None of somebody who is no member."""
        labels = {"peer": peer, "reason": reason}
        registry = self.observer.metrics.registry
        return registry.get_sample_value("lightyear_peer_refusals_total", labels)


class Wire:
    """A line from one side to another, as the network would carry it."""

    def __init__(self, caller: Side, callee: Side) -> None:
        self.caller, self.callee = caller.identity.name, callee.conversation

    async def hello(self, hello: Hello) -> Hello:
        return await self.callee.hello(self.caller, hello)

    async def announce(self, announcement: Announcement) -> Announcement:
        return await self.callee.announce(self.caller, announcement)


def contact(caller: Side, callee: Side) -> None:
    asyncio.run(caller.conversation.contact(callee.identity.name, Wire(caller, callee)))


def test_one_call_tells_both_sides_everything() -> None:
    a, b = Side("site-a"), Side("site-b")
    ours, theirs = a.seal(), b.seal()
    contact(a, b)
    assert a.events == [Answered(B), Announced(theirs.manifest.update, *AT_WORK)]
    assert b.events == [Heard(a.identity.name), Announced(ours.manifest.update, *AT_WORK)]
    assert a.archive.find(theirs.manifest.update) == theirs
    assert a.observer.peers[B].state == "reachable"


def test_the_greeting_is_said_once_and_again_after_a_failure() -> None:
    a, b = Side("site-a"), Side("site-b")
    contact(a, b)
    contact(a, b)
    assert a.events == [Answered(B), Heard(B, *AT_WORK), Heard(B, *AT_WORK)]

    class Cut(Wire):
        async def announce(self, announcement: Announcement) -> Announcement:
            raise PeerUnreachable(B, Reason.UNREACHABLE, "connection refused")

    asyncio.run(a.conversation.contact(B, Cut(a, b)))
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
def test_who_cannot_work_with_us_is_refused_on_both_sides(
    changed: dict[str, str], reason: Reason
) -> None:
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
def test_a_question_is_answered_whatever_differs_and_then_forgotten(
    changed: dict[str, str],
) -> None:
    a, b = Side("site-a"), Side("site-b", **changed)
    before = b.conversation.stamp()
    # Nothing in it counts: neither a version from the future nor a stamp at the end of time.
    question = replace(
        b.conversation._hello(a.identity.name, 2**60, probe=True),
        federation="ward",
        schema=SCHEMA,
        version_min=7,
        version_max=9,
        boot_id="check",
    )
    answer = asyncio.run(b.conversation.hello(a.identity.name, question))
    assert answer.probe
    assert (answer.federation, answer.schema) == (b.facts.federation, b.facts.schema)
    assert answer.agreement == b.facts.agreement
    assert b.conversation.stamp() == before + 1
    assert not b.events
    assert not b.log.getvalue()
    assert b.observer.peers[PeerName("site-a")] == PeerView()
    assert not any(b.refusals("site-a", reason) for reason in Reason)
    # The first real greeting is still the first.
    contact(a, b)
    assert bool(b.events) == (not changed or "agreement" in changed)


def test_differences_that_are_no_obstacle_are_told_once() -> None:
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
        ({"lamport": 2**50}, Reason.MALFORMED),
    ],
)
def test_an_unsound_manifest_is_refused_and_counted(
    changed: dict[str, object], reason: Reason
) -> None:
    a, b = Side("site-a"), Side("site-b")
    signed = b.seal(**changed)
    contact(a, b)
    assert a.refusals("site-b", reason) == 1
    assert a.archive.find(signed.manifest.update) is None
    assert not any(isinstance(event, Announced) for event in a.events)


def test_nobody_speaks_for_another_or_with_anothers_hand() -> None:
    a, b, c = Side("site-a"), Side("site-b"), Side("site-c")
    b.latest = c.seal()
    contact(a, b)
    assert a.refusals("site-b", Reason.IDENTITY) == 1
    forged = replace(c.seal().manifest, update=b.seal().manifest.update)
    b.latest = c.identity.sign_manifest(forged)
    contact(a, b)
    assert a.refusals("site-b", Reason.SIGNATURE) == 1
    assert not any(isinstance(event, Announced) for event in a.events)


def test_our_own_update_under_anothers_name_is_an_echo() -> None:
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


def test_a_stamp_far_ahead_is_refused_and_moves_nothing() -> None:
    a = Side("site-a")
    before = a.conversation.stamp()
    liar = Announcement(2**60, Round(0), "training", None)
    with pytest.raises(PeerMisbehaved, match="far beyond"):
        asyncio.run(a.conversation.announce(B, liar))
    assert a.conversation.stamp() == before + 1


def test_stamps_only_grow_and_follow_what_was_heard() -> None:
    a = Side("site-a")
    asyncio.run(a.conversation.announce(B, Announcement(1000, Round(0), "training", None)))
    assert a.conversation.stamp() > 1000


def test_a_flood_of_updates_takes_no_memory() -> None:
    a, b = Side("site-a"), Side("site-b")
    first = b.seal(0)
    for round in range(50):
        b.seal(round)
        contact(a, b)
    assert a.archive.find(first.manifest.update) is None
    assert len(a.archive._manifests[B]) <= 4


def test_repeating_old_updates_does_not_push_out_the_newest() -> None:
    a, b = Side("site-a"), Side("site-b")
    newest = b.seal(100)
    contact(a, b)
    for round in range(10):
        b.seal(round)
        contact(a, b)
    assert a.archive.find(newest.manifest.update) == newest


def pins_of(*names: str) -> dict[PeerName, tuple[Certificate, ...]]:
    return {PeerName(name): (IDENTITIES[name].certificate,) for name in names}


def test_a_removed_peer_is_refused_also_with_what_was_on_its_way() -> None:
    a, b = Side("site-a"), Side("site-b")
    theirs = b.seal()
    contact(a, b)
    said = len(a.events)
    a.agree("1", pins_of("site-a", "site-c"))
    assert a.archive.find(theirs.manifest.update) is None
    a.observer.reconfigured("site-b is removed", 0.0, [PeerName("site-c")])
    # It may call us, or answer a call of ours that began before.
    contact(b, a)
    contact(a, b)
    assert len(a.events) == said
    assert a.archive.find(theirs.manifest.update) is None
    assert a.refusals("site-b", Reason.IDENTITY) is None, "it is not counted any more"
    assert a.observer.peers[B].state == "removed", "its last words do not change that"


def test_a_withdrawn_signing_key_vouches_for_nothing_any_more() -> None:
    a, b = Side("site-a"), Side("site-b")
    theirs = b.seal()
    contact(a, b)
    another = {**pins_of("site-a", "site-c"), B: (make_identity(B, NOW).certificate,)}
    a.agree("1", another)
    assert a.archive.find(theirs.manifest.update) is None
    contact(a, b)
    assert a.refusals("site-b", Reason.SIGNATURE) == 1


def test_a_renewed_certificate_with_the_same_signing_key_costs_nothing() -> None:
    a, b = Side("site-a"), Side("site-b")
    theirs = b.seal()
    contact(a, b)
    renewed = make_identity(B, NOW, IDENTITIES[B].signing_key)
    a.agree("1", {**pins_of("site-a"), B: (renewed.certificate,)})
    assert a.archive.find(theirs.manifest.update) == theirs
    contact(a, b)
    assert a.observer.peers[B].state == "reachable"


def test_everybody_is_told_of_a_new_agreement_and_compares_it_once() -> None:
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
