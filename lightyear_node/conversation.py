"""What this site says to its peers, and what it makes of what they say.

Both directions meet here: the calls we make at every heartbeat and the calls we answer.  A peer's
words are checked once, in one place, and become events for the barrier; what cannot be used is
refused, counted under its reason, and changes nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from lightyear_node.admission import lamport_jumps, refusal
from lightyear_node.barrier import Announced, Answered, Event, Heard, Phase
from lightyear_node.errors import PeerError, PeerMisbehaved, PeerRefusedUs, PeerUnreachable
from lightyear_node.identity import Certificate
from lightyear_node.observe.observer import Observer
from lightyear_node.records import (
    Announcement,
    Digest,
    Hello,
    PeerName,
    Reason,
    Round,
    SignedManifest,
    Transfer,
    Update,
)
from lightyear_node.transport.codec import Grid
from lightyear_node.transport.outbox import Offer

PROTOCOL_VERSION = 1
MANIFESTS_KEPT = 4
"""Per peer: the one being fetched, the one held, and what may arrive meanwhile."""
OWN_UPDATES_KEPT = 64
"""Digests of our own that we would know again: more rounds than anybody is behind."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is compared when two sites meet; only `agreement` changes while the node runs."""

    us: PeerName
    federation: str
    agreement: Digest
    schema: Digest
    initial_model: Digest
    grid: Grid
    boot_id: str
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Saying:
    """Our state of this moment."""

    round: Round
    phase: str
    latest: SignedManifest | None


class Line(Protocol):
    """A way to call one peer."""

    async def hello(self, hello: Hello) -> Hello: ...

    async def announce(self, announcement: Announcement) -> Announcement: ...


class Conversation:
    def __init__(
        self,
        facts: Facts,
        pins: Mapping[PeerName, tuple[Certificate, ...]],
        observer: Observer,
        *,
        say: Callable[[], Saying],
        tell: Callable[[Event], None],
        offer: Callable[[Digest], Awaitable[Offer | None]],
        wall_ns: Callable[[], int],
        lamport: int,
    ) -> None:
        self._facts = facts
        self._keys = _signing_keys(pins)
        self._observer = observer
        self._say = say
        self._tell = tell
        self._offer = offer
        self._wall_ns = wall_ns
        self._lamport = lamport
        self._greeted: set[PeerName] = set()
        self._compared: dict[PeerName, tuple[str, Digest, Digest]] = {}
        self._manifests: dict[PeerName, dict[Digest, SignedManifest]] = {}
        self._own: deque[Digest] = deque(maxlen=OWN_UPDATES_KEPT)

    def agree(self, agreement: Digest, pins: Mapping[PeerName, tuple[Certificate, ...]]) -> None:
        """Take new settings: whose signatures count, and the digest that everybody compares."""
        keys = _signing_keys(pins)
        for peer, known in self._keys.items():
            if not set(known) <= set(keys.get(peer, ())):
                # Something that only a withdrawn key vouches for may be among them.
                self._manifests.pop(peer, None)
        self._keys = keys
        self._facts = replace(self._facts, agreement=agreement)
        self._greeted.clear()

    def stamp(self) -> int:
        """The next Lamport stamp: greater than any we have given or seen."""
        self._lamport += 1
        return self._lamport

    def manifest(self, update: Update) -> SignedManifest | None:
        return self._manifests.get(update.peer, {}).get(update.digest)

    # The calls we make.

    async def contact(self, peer: PeerName, line: Line) -> None:
        """One heartbeat with one peer: a greeting if we have not met since either began."""
        try:
            if peer not in self._greeted:
                told = self._facts
                theirs = await line.hello(self._hello(self.stamp()))
                self._meet(peer, theirs)
                if told is self._facts:  # or else it has still to hear of what has changed
                    self._greeted.add(peer)
                self._tell(Answered(peer))
            reply = await line.announce(self._announcement())
            self._hear(peer, reply)
            self._observer.reached(peer, reply.round, reply.phase)
        except PeerUnreachable as problem:
            self._greeted.discard(peer)
            self._observer.unreachable(peer, _without_name(problem))
        except PeerRefusedUs as problem:
            self._greeted.discard(peer)
            self._observer.refused(peer, problem.reason, _without_name(problem))
        except PeerMisbehaved as problem:
            self._observer.refused(peer, problem.reason, _without_name(problem))

    # The calls we answer.

    async def hello(self, peer: PeerName, hello: Hello) -> Hello:
        if hello.probe:
            # Only a question, which may come from a site that does not fit at all: it compares.
            return self._hello(self._lamport, probe=True)
        try:
            self._meet(peer, hello)
        except PeerMisbehaved as problem:
            self._observer.refused(peer, problem.reason, _without_name(problem))
            raise
        self._tell(Heard(peer))
        return self._hello(self.stamp())

    async def announce(self, peer: PeerName, announcement: Announcement) -> Announcement:
        try:
            self._hear(peer, announcement)
            self._observer.called(peer, announcement.round, announcement.phase)
        except PeerMisbehaved as problem:
            self._observer.refused(peer, problem.reason, _without_name(problem))
            raise
        return self._announcement()

    async def offer(self, peer: PeerName, digest: Digest) -> Offer | None:
        return await self._offer(digest)

    def served(self, peer: PeerName, transfer: Transfer) -> None:
        self._observer.transferred(peer, "sent", transfer)

    def denied(self, reason: str, peer: PeerName | None) -> None:
        self._observer.stranger(reason)

    # What we make of their words.

    def _meet(self, peer: PeerName, theirs: Hello) -> None:
        ours = self._facts
        self._refuse_removed(peer)
        self._advance(peer, theirs.lamport)
        problem: tuple[Reason, str] | None = None
        if not theirs.version_min <= PROTOCOL_VERSION <= theirs.version_max:
            problem = (
                Reason.VERSION,
                f"it speaks protocol {theirs.version_min} to {theirs.version_max},"
                f" we speak {PROTOCOL_VERSION}: upgrade the older site",
            )
        elif theirs.federation != ours.federation:
            problem = (
                Reason.FEDERATION,
                f"it belongs to the federation {theirs.federation!r}, not {ours.federation!r}",
            )
        elif theirs.schema != ours.schema:
            problem = (
                Reason.SCHEMA_MISMATCH,
                "its model has other tensors than ours: both sites must run the same task,"
                " with the same `exchange` in peers.yaml",
            )
        if problem is not None:
            raise PeerMisbehaved(peer, *problem)
        compared = (theirs.boot_id, theirs.agreement, ours.agreement)
        if compared != self._compared.get(peer):
            self._compared[peer] = compared
            self._warn_about_differences(peer, theirs)

    def _warn_about_differences(self, peer: PeerName, theirs: Hello) -> None:
        """Reasons to look, not to part: whoever is in both files can go on."""
        if theirs.agreement != self._facts.agreement:
            self._observer.differs(peer, "its peers.yaml says something else than ours")
        if theirs.initial_model != self._facts.initial_model:
            self._observer.differs(
                peer,
                "it started from other weights than we did, so its models will not fit ours:"
                " give the task a function as `model`, and the same seed",
            )

    def _refuse_removed(self, peer: PeerName) -> None:
        """Its call, or its answer, may have been on the way while it was removed."""
        if peer not in self._keys:
            raise PeerMisbehaved(peer, Reason.IDENTITY, "it is no longer in our peers.yaml")

    def _hear(self, peer: PeerName, theirs: Announcement) -> None:
        self._refuse_removed(peer)
        self._advance(peer, theirs.lamport)
        signed = theirs.latest
        if signed is not None and self.manifest(signed.manifest.update) != signed:
            wrong = refusal(
                signed,
                peer=peer,
                federation=self._facts.federation,
                schema=self._facts.schema,
                raw_bytes=self._facts.grid.raw_bytes,
                dtype=self._facts.dtype,
                verify_keys=self._keys[peer],
                lamport=self._lamport,
            )
            if wrong is not None:
                raise PeerMisbehaved(peer, *wrong)
            if signed.manifest.update.digest in self._own:
                # It would agree with us perfectly, and teach us nothing.
                raise PeerMisbehaved(peer, Reason.ECHO, "it announces an update of our own as its")
            self._remember(signed)
        at_work = theirs.phase == Phase.TRAINING
        if signed is not None:
            self._tell(Announced(signed.manifest.update, at_work))
        else:
            self._tell(Heard(peer, at_work))

    def _remember(self, signed: SignedManifest) -> None:
        update = signed.manifest.update
        known = self._manifests.setdefault(update.peer, {})
        known[update.digest] = signed
        if len(known) > MANIFESTS_KEPT:
            # Not the first to come: a peer that repeats old ones must not push out its newest.
            oldest = min(known.values(), key=lambda signed: signed.manifest.update.age)
            del known[oldest.manifest.update.digest]

    def _advance(self, peer: PeerName, theirs: int) -> None:
        """Lamport's rule, except that nobody may push our clock to its end."""
        if lamport_jumps(theirs, self._lamport):
            raise PeerMisbehaved(
                peer, Reason.MALFORMED, f"its stamp {theirs} is far beyond ours, {self._lamport}"
            )
        self._lamport = max(self._lamport, theirs) + 1

    # Our words.

    def _hello(self, lamport: int, *, probe: bool = False) -> Hello:
        facts = self._facts
        return Hello(
            version_min=PROTOCOL_VERSION,
            version_max=PROTOCOL_VERSION,
            federation=facts.federation,
            agreement=facts.agreement,
            schema=facts.schema,
            initial_model=facts.initial_model,
            round=self._say().round,
            boot_id=facts.boot_id,
            wall_time_ns=self._wall_ns(),
            lamport=lamport,
            probe=probe,
        )

    def _announcement(self) -> Announcement:
        saying = self._say()
        if saying.latest is not None and saying.latest.manifest.update.digest not in self._own:
            self._own.append(saying.latest.manifest.update.digest)
        return Announcement(self.stamp(), saying.round, saying.phase, saying.latest)


def _signing_keys(
    pins: Mapping[PeerName, tuple[Certificate, ...]],
) -> dict[PeerName, list[bytes]]:
    return {peer: [one.signing_key for one in pinned] for peer, pinned in pins.items()}


def _without_name(problem: PeerError) -> str:
    return str(problem).removeprefix(f"{problem.peer}: ")
