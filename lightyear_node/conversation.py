"""What this site says to its peers, and what it makes of what they say.

Both directions meet here: the calls we make at every heartbeat and the calls we answer.  A peer's
words are checked once, in one place, and become events for the barrier; what cannot be used is
refused, counted under its reason, and changes nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from lightyear_node.admission import lamport_jumps
from lightyear_node.archive import Archive, contradicts
from lightyear_node.barrier import Accused, Announced, Answered, Event, Heard, Reported
from lightyear_node.errors import PeerError, PeerMisbehaved, PeerRefusedUs, PeerUnreachable
from lightyear_node.observe.metrics import SENT
from lightyear_node.observe.observer import Observer
from lightyear_node.records import (
    Announcement,
    Digest,
    Evidence,
    Hello,
    Opinion,
    PeerName,
    Reason,
    Round,
    SignedHead,
    SignedManifest,
    Transfer,
    Update,
)
from lightyear_node.transport.codec import Grid
from lightyear_node.transport.outbox import Offer

PROTOCOL_VERSION = 1
OWN_UPDATES_KEPT = 64
"""Digests of our own that we would know again: more rounds than anybody is behind."""
BOOTS_KEPT = 8
"""Earlier starts of a peer that we would know again."""
UNSOUND_MAX = 8
"""Unsound manifests of others in one announcement, before the rest is not looked at."""


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
    clauses: Mapping[str, str] = field(default_factory=dict)
    """What `agreement` is the digest of, by key."""


@dataclass(frozen=True, slots=True)
class Saying:
    """Our state of this moment."""

    round: Round
    phase: str
    latest: SignedManifest | None
    progress: int = 0
    vouched: tuple[Update, ...] = ()
    """The updates of others that we vouch for, as they are on the disk."""
    evidence: tuple[Evidence, ...] = ()
    head: SignedHead | None = None


class Diary(Protocol):
    """What is remembered of and for each peer; the node's record implements it."""

    def opinion_of(self, peer: PeerName) -> Opinion | None:
        """What to tell a peer about its update, if anything."""

    def told(self, peer: PeerName, opinion: Opinion) -> None:
        """A peer says what it thinks of ours."""

    def head_of(self, peer: PeerName) -> SignedHead | None:
        """The newest head of a peer's journal that we hold."""

    def hold(self, peer: PeerName, head: SignedHead) -> None: ...

    def claimed(self, peer: PeerName, head: SignedHead) -> None:
        """A peer says that it holds this head of our own journal."""


class Line(Protocol):
    """A way to call one peer."""

    async def hello(self, hello: Hello) -> Hello: ...

    async def announce(self, announcement: Announcement) -> Announcement: ...


class Conversation:
    def __init__(
        self,
        facts: Facts,
        archive: Archive,
        observer: Observer,
        diary: Diary,
        *,
        say: Callable[[], Saying],
        tell: Callable[[Event], None],
        offer: Callable[[PeerName, Digest], Awaitable[Offer | None]],
        wall_ns: Callable[[], int],
        lamport: int,
    ) -> None:
        self._facts = facts
        self._archive = archive
        self._observer = observer
        self._diary = diary
        self._say = say
        self._tell = tell
        self._offer = offer
        self._wall_ns = wall_ns
        self._lamport = lamport
        self._greeted: set[PeerName] = set()
        self._compared: dict[PeerName, tuple[str, Digest, Digest]] = {}
        self._boots: dict[PeerName, deque[str]] = {}
        self._own: deque[Digest] = deque(maxlen=OWN_UPDATES_KEPT)

    def agree(self, facts: Facts) -> None:
        """Take new settings, which everybody compares."""
        self._facts = facts
        self._greeted.clear()

    def stamp(self) -> int:
        """The next Lamport stamp: greater than any we have given or seen."""
        self._lamport += 1
        return self._lamport

    # The calls we make.

    async def contact(self, peer: PeerName, line: Line) -> None:
        """One heartbeat with one peer: a greeting if we have not met since either began."""
        try:
            if peer not in self._greeted:
                told = self._facts
                theirs = await line.hello(self._hello(peer, self.stamp()))
                self._meet(peer, theirs)
                if told is self._facts:  # or else it has still to hear of what has changed
                    self._greeted.add(peer)
                self._tell(Answered(peer, self._own_update(theirs.yours)))
            reply = await line.announce(self._announcement(peer))
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
            return self._hello(peer, self._lamport, probe=True)
        try:
            self._meet(peer, hello)
        except PeerMisbehaved as problem:
            self._observer.refused(peer, problem.reason, _without_name(problem))
            raise
        self._tell(Heard(peer))
        ours = self._own_update(hello.yours)
        if ours is not None:
            self._tell(Reported(peer, (ours,)))
        return self._hello(peer, self.stamp())

    async def announce(self, peer: PeerName, announcement: Announcement) -> Announcement:
        try:
            self._hear(peer, announcement)
            self._observer.called(peer, announcement.round, announcement.phase)
        except PeerMisbehaved as problem:
            self._observer.refused(peer, problem.reason, _without_name(problem))
            raise
        return self._announcement(peer)

    async def offer(self, peer: PeerName, digest: Digest) -> Offer | None:
        return await self._offer(peer, digest)

    def served(self, peer: PeerName, transfer: Transfer) -> None:
        self._observer.transferred(peer, SENT, transfer)

    def not_served(self, peer: PeerName, reason: Reason) -> None:
        self._observer.sending_failed(peer, reason)

    def denied(self, reason: str, peer: PeerName | None) -> None:
        self._observer.denied(peer, reason)

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
        if theirs.your_head is not None:
            self._diary.claimed(peer, theirs.your_head)

    def _warn_about_differences(self, peer: PeerName, theirs: Hello) -> None:
        """Reasons to look, not to part: whoever is in both files can go on."""
        differences: list[str] = []
        if theirs.agreement != self._facts.agreement:
            differences.append(_in_words(self._facts.clauses, theirs.clauses))
        if theirs.initial_model != self._facts.initial_model:
            differences.append(
                "it started from other weights than we did, so its models will not fit ours:"
                " give the task a function as `model`, and the same seed"
            )
        self._observer.differs(peer, differences)

    def _refuse_removed(self, peer: PeerName) -> None:
        """Its call, or its answer, may have been on the way while it was removed."""
        if not self._archive.knows(peer):
            raise PeerMisbehaved(peer, Reason.IDENTITY, "it is no longer in our peers.yaml")

    def _hear(self, peer: PeerName, theirs: Announcement) -> None:
        self._refuse_removed(peer)
        self._refuse_second_node(peer, theirs.boot_id)
        self._advance(peer, theirs.lamport)
        signed = theirs.latest
        if signed is None:
            self._tell(Heard(peer, theirs.phase, theirs.progress))
        else:
            self._admit(peer, signed)
            self._tell(Announced(signed.manifest.update, theirs.phase, theirs.progress))
        self._consider(peer, theirs)
        if theirs.head is not None:
            self._diary.hold(peer, theirs.head)
        if theirs.opinion is not None and theirs.opinion.digest in self._own:
            self._diary.told(peer, theirs.opinion)

    def _admit(self, peer: PeerName, signed: SignedManifest) -> None:
        update = signed.manifest.update
        wrong: tuple[Reason, str] | None = None
        if update.peer != peer:
            wrong = Reason.IDENTITY, f"it sent a manifest in the name of {update.peer!r}"
        elif update.digest in self._own:
            # It would agree with us perfectly, and teach us nothing.
            wrong = Reason.ECHO, "it announces an update of our own as its"
        wrong = wrong or self._archive.refusal(signed, self._lamport)
        if wrong is not None:
            raise PeerMisbehaved(peer, *wrong)

    def _consider(self, peer: PeerName, theirs: Announcement) -> None:
        """What a peer says of others counts as far as those have signed it.

        It is not blamed for the rest: two sites may know different keys of a third for a while.
        """
        unsound = 0
        reported: list[Update] = []
        for signed in theirs.seen:
            if unsound >= UNSOUND_MAX:
                break
            if self._archive.refusal(signed, self._lamport) is None:
                reported.append(signed.manifest.update)
            else:
                unsound += 1
        if reported:
            self._tell(Reported(peer, tuple(reported)))
        for proof in theirs.evidence:
            if contradicts(proof) and self._is_sound(proof):
                first, second = proof.first.manifest.update, proof.second.manifest.update
                self._tell(Accused(first, second))
                if first.peer == self._facts.us:
                    self._observer.accused(peer, first.round)

    def _is_sound(self, proof: Evidence) -> bool:
        both = (proof.first, proof.second)
        return all(self._archive.refusal(signed, self._lamport) is None for signed in both)

    def _own_update(self, signed: SignedManifest | None) -> Update | None:
        """An update of ours that another site holds, if we have really signed it."""
        if signed is None or signed.manifest.update.peer != self._facts.us:
            return None
        sound = self._archive.refusal(signed, self._lamport) is None
        return signed.manifest.update if sound else None

    def _refuse_second_node(self, peer: PeerName, boot_id: str) -> None:
        """A start that another one has followed is over; if it still talks, there are two."""
        boots = self._boots.setdefault(peer, deque(maxlen=BOOTS_KEPT))
        if boot_id and boot_id not in boots:
            boots.append(boot_id)
        elif boot_id and boot_id != boots[-1]:
            raise PeerMisbehaved(
                peer,
                Reason.IDENTITY,
                "two nodes run with its keys; only the one that was started last is heard:"
                " stop the other, and never copy keys to a second machine",
            )

    def _advance(self, peer: PeerName, theirs: int) -> None:
        """Lamport's rule, except that nobody may push our clock to its end."""
        if lamport_jumps(theirs, self._lamport):
            raise PeerMisbehaved(
                peer, Reason.MALFORMED, f"its stamp {theirs} is far beyond ours, {self._lamport}"
            )
        self._lamport = max(self._lamport, theirs) + 1

    # Our words.

    def _hello(self, peer: PeerName, lamport: int, *, probe: bool = False) -> Hello:
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
            yours=self._archive.newest_of(peer),
            clauses=facts.clauses,
            your_head=self._diary.head_of(peer),
        )

    def _announcement(self, peer: PeerName) -> Announcement:
        saying = self._say()
        if saying.latest is not None and saying.latest.manifest.update.digest not in self._own:
            self._own.append(saying.latest.manifest.update.digest)
        seen = (self._archive.find(update) for update in saying.vouched)
        return Announcement(
            lamport=self.stamp(),
            round=saying.round,
            phase=saying.phase,
            latest=saying.latest,
            seen=tuple(signed for signed in seen if signed is not None),
            evidence=saying.evidence,
            head=saying.head,
            progress=saying.progress,
            opinion=self._diary.opinion_of(peer),
            boot_id=self._facts.boot_id,
        )


def _in_words(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Which keys of two agreements differ; a clause is one setting, or one site."""
    words = [
        f"{_named(key)} is not the same"
        for key in sorted(ours.keys() & theirs.keys())
        if ours[key] != theirs[key]
    ]
    words += [f"{_named(key)} is only in ours" for key in sorted(ours.keys() - theirs.keys())]
    words += [f"{_named(key)} is only in its copy" for key in sorted(theirs.keys() - ours.keys())]
    if not words or not theirs:
        return "its peers.yaml says something else than ours"
    return f"its peers.yaml differs from ours: {', '.join(words)}"


def _named(key: str) -> str:
    return key.removeprefix("peers.") if key.startswith("peers.") else f"`{key}`"


def _without_name(problem: PeerError) -> str:
    return str(problem).removeprefix(f"{problem.peer}: ")
