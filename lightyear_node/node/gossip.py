"""Exchanges state with the peers: greetings, announcements, and what peers report of each other.

Both directions meet here: the calls we make at every heartbeat and the calls we answer.  A peer's
message is checked once, in one place, and becomes events for the barrier.  What is invalid is
refused, counted under its reason, and changes nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from lightyear_node.errors import (
    DamagedFile,
    PeerMisbehaved,
    PeerRefusedUs,
    PeerUnreachable,
)
from lightyear_node.node.peer_memory import PeerMemory
from lightyear_node.observe.metrics import SENT
from lightyear_node.observe.observer import Observer
from lightyear_node.protocol.events import Accused, Announced, Answered, Event, Heard, Reported
from lightyear_node.protocol.manifests import ManifestStore, contradicts
from lightyear_node.transport.client import PeerClient
from lightyear_node.transport.codec import ChunkGrid
from lightyear_node.transport.upload_cache import Upload
from lightyear_node.types import (
    Announcement,
    Digest,
    Evidence,
    Hello,
    PeerName,
    Reason,
    Round,
    SignedHead,
    SignedManifest,
    Transfer,
    Update,
)

PROTOCOL_VERSION = 1
OWN_UPDATES_KEPT = 64
"""Own digests that are recognised when a peer sends them back: more rounds than any lag."""
SAME_TASK = ": both sites must run the same task, with the same `exchange` in peers.yaml"
BOOTS_KEPT = 8
"""Earlier starts of a peer that are recognised."""
DIFFERENCES_MAX = 8
"""Differing keys that are named in one line."""
UNSOUND_MAX = 8
"""Invalid manifests in one announcement before the rest is ignored."""


@dataclass(frozen=True, slots=True)
class LocalFacts:
    """What two sites compare in `Hello`; `agreement` and `clauses` change while the node runs."""

    us: PeerName
    federation: str
    agreement: Digest
    schema: Digest
    initial_model: Digest
    grid: ChunkGrid
    boot_id: str
    dtype: str = "float32"
    clauses: Mapping[str, str] = field(default_factory=dict)
    """Digests of the single settings of the federation config, by key; `agreement` covers all."""


@dataclass(frozen=True, slots=True)
class LocalState:
    """This site's state at one moment, as peers may see it."""

    round: Round
    phase: str
    latest: SignedManifest | None
    progress: int = 0
    vouched: tuple[Update, ...] = ()
    """Peers' updates that this site has durably recorded as seen."""
    evidence: tuple[Evidence, ...] = ()
    head: SignedHead | None = None
    stamp: int = 0
    """The number of records in our journal."""


class EventSink(Protocol):
    """Takes an event together with the signed manifests that prove it."""

    def __call__(self, event: Event, *proofs: SignedManifest) -> None: ...


class Gossip:
    def __init__(
        self,
        facts: LocalFacts,
        manifests: ManifestStore,
        observer: Observer,
        peer_memory: PeerMemory,
        *,
        state: Callable[[], LocalState],
        emit: EventSink,
        offer: Callable[[PeerName, Digest], Awaitable[Upload | None]],
        wall_ns: Callable[[], int],
    ) -> None:
        self._facts = facts
        self._manifests = manifests
        self._observer = observer
        self._peer_memory = peer_memory
        self._state = state
        self._emit = emit
        self._offer = offer
        self._wall_ns = wall_ns
        self._greeted: set[PeerName] = set()
        self._compared: dict[PeerName, tuple[str, Digest, Digest]] = {}
        self._boots: dict[PeerName, deque[str]] = {}
        self._own: deque[Digest] = deque(maxlen=OWN_UPDATES_KEPT)

    def reconfigure(self, agreement: Digest, clauses: Mapping[str, str]) -> None:
        """Compare this federation config with the peers' from now on."""
        self._facts = replace(self._facts, agreement=agreement, clauses=clauses)
        self._greeted.clear()

    # Outgoing calls.

    async def contact(self, peer: PeerName, line: PeerClient) -> None:
        """One heartbeat with one peer; greets it first if either side has restarted since."""
        try:
            if peer not in self._greeted:
                facts = self._facts
                theirs = await line.hello(self.greeting(peer))
                self._check_hello(peer, theirs)
                if facts is self._facts:  # or else the configuration changed during the call
                    self._greeted.add(peer)
                self._emit(Answered(peer, self._own_update(theirs.yours)))
            reply = await line.announce(self._announcement(peer))
            self._check_announcement(peer, reply)
            self._observer.peers.reached(peer, reply.round, reply.phase)
        except PeerUnreachable as problem:
            self._greeted.discard(peer)
            self._observer.peers.unreachable(peer, problem.about)
        except PeerRefusedUs as problem:
            self._greeted.discard(peer)
            self._observer.peers.refused(peer, problem.reason, problem.about)
        except PeerMisbehaved as problem:
            self._observer.peers.refused(peer, problem.reason, problem.about)

    # Incoming calls.

    async def hello(self, peer: PeerName, hello: Hello) -> Hello:
        if hello.probe:
            # A connectivity check; the caller compares, also where nothing matches.
            return self.greeting(peer, probe=True)
        try:
            self._check_hello(peer, hello)
        except PeerMisbehaved as problem:
            self._observer.peers.refused(peer, problem.reason, problem.about)
            raise
        self._emit(Heard(peer))
        ours = self._own_update(hello.yours)
        if ours is not None:
            self._emit(Reported(peer, (ours,)))
        return self.greeting(peer)

    async def announce(self, peer: PeerName, announcement: Announcement) -> Announcement:
        try:
            self._check_announcement(peer, announcement)
            self._observer.peers.called(peer, announcement.round, announcement.phase)
        except PeerMisbehaved as problem:
            self._observer.peers.refused(peer, problem.reason, problem.about)
            raise
        return self._announcement(peer)

    async def offer(self, peer: PeerName, digest: Digest) -> Upload | None:
        return await self._offer(peer, digest)

    def upload_finished(self, peer: PeerName, transfer: Transfer) -> None:
        self._observer.peers.transferred(peer, SENT, transfer)

    def upload_failed(self, peer: PeerName, reason: Reason) -> None:
        self._observer.peers.sending_failed(peer, reason)

    def strangers_closed(self, count: int) -> None:
        self._observer.connections_closed(count)

    def denied(self, reason: str, peer: PeerName | None) -> None:
        self._observer.peers.denied(peer, reason)

    def damaged(self, problem: DamagedFile) -> None:
        self._observer.damaged("own", str(problem))

    # Checking what peers send.

    def _check_hello(self, peer: PeerName, theirs: Hello) -> None:
        ours = self._facts
        self._refuse_removed(peer)
        if not theirs.version_min <= PROTOCOL_VERSION <= theirs.version_max:
            raise PeerMisbehaved(
                peer,
                Reason.VERSION,
                f"it speaks protocol {theirs.version_min} to {theirs.version_max},"
                f" we speak {PROTOCOL_VERSION}: upgrade the older site",
                message_for_peer=f"it speaks protocol {PROTOCOL_VERSION}, we speak"
                f" {theirs.version_min} to {theirs.version_max}: upgrade the older site",
            )
        if theirs.federation != ours.federation:
            about = f"it belongs to the federation {theirs.federation!r}, not {ours.federation!r}"
            for_peer = (
                f"it belongs to the federation {ours.federation!r}, not {theirs.federation!r}"
            )
            raise PeerMisbehaved(peer, Reason.FEDERATION, about, message_for_peer=for_peer)
        if theirs.schema != ours.schema:
            about = f"its model has other tensors than ours{SAME_TASK}"
            for_peer = f"our model has other tensors than its model{SAME_TASK}"
            raise PeerMisbehaved(peer, Reason.SCHEMA_MISMATCH, about, message_for_peer=for_peer)
        compared = (theirs.boot_id, theirs.agreement, ours.agreement)
        if compared != self._compared.get(peer):
            self._compared[peer] = compared
            self._warn_about_differences(peer, theirs)
        if theirs.your_head is not None:
            self._peer_memory.claimed(peer, theirs.your_head)

    def _warn_about_differences(self, peer: PeerName, theirs: Hello) -> None:
        """Differences are warnings: sites that are in both files can go on."""
        differences: list[str] = []
        if theirs.agreement != self._facts.agreement:
            differences.append(differences_text(self._facts.clauses, theirs.clauses))
        if theirs.initial_model != self._facts.initial_model:
            differences.append(
                "it started from other weights than we did, so its models will not fit ours:"
                " give the task a function as `model`, and the same seed"
            )
        self._observer.peers.differs(peer, differences)

    def _refuse_removed(self, peer: PeerName) -> None:
        """A peer may have been removed while its call or answer was under way."""
        if not self._manifests.knows(peer):
            raise PeerMisbehaved(
                peer,
                Reason.IDENTITY,
                "it is no longer in our peers.yaml",
                message_for_peer="we are no longer in its peers.yaml",
            )

    def _check_announcement(self, peer: PeerName, theirs: Announcement) -> None:
        self._refuse_removed(peer)
        self._refuse_second_node(peer, theirs.boot_id)
        signed = theirs.latest
        if signed is None:
            self._emit(Heard(peer, theirs.phase, theirs.progress))
        else:
            self._admit(peer, signed)
            self._emit(Announced(signed.manifest.update, theirs.phase, theirs.progress), signed)
        self._check_reports(peer, theirs)
        if theirs.head is not None:
            self._peer_memory.hold(peer, theirs.head)
        if theirs.opinion is not None and theirs.opinion.digest in self._own:
            self._peer_memory.store_opinion(peer, theirs.opinion)

    def _admit(self, peer: PeerName, signed: SignedManifest) -> None:
        update = signed.manifest.update
        wrong: tuple[Reason, str] | None = None
        if update.peer != peer:
            wrong = Reason.IDENTITY, f"it sent a manifest in the name of {update.peer!r}"
        elif update.digest in self._own:
            # A copy of our own update has a perfect agreement score and no information.
            wrong = Reason.ECHO, "it announced one of our updates as its own"
        wrong = wrong or self._manifests.refusal(signed)
        if wrong is not None:
            raise PeerMisbehaved(peer, *wrong)

    def _check_reports(self, peer: PeerName, theirs: Announcement) -> None:
        """Use what a peer reports of other sites, as far as those have signed it.

        The peer is not blamed for the rest: during a renewal two sites may know different keys of
        a third one.
        """
        unsound = 0
        reported: list[SignedManifest] = []
        for signed in theirs.seen:
            if unsound >= UNSOUND_MAX:
                break
            if self._manifests.refusal(signed) is None:
                reported.append(signed)
            else:
                unsound += 1
        if reported:
            updates = tuple(signed.manifest.update for signed in reported)
            self._emit(Reported(peer, updates), *reported)
        for proof in theirs.evidence:
            if contradicts(proof) and self._is_sound(proof):
                first, second = proof.first.manifest.update, proof.second.manifest.update
                self._emit(Accused(first, second), proof.first, proof.second)
                if first.peer == self._facts.us:
                    self._observer.peers.accused(peer, first.round)

    def _is_sound(self, proof: Evidence) -> bool:
        both = (proof.first, proof.second)
        return all(self._manifests.refusal(signed) is None for signed in both)

    def _own_update(self, signed: SignedManifest | None) -> Update | None:
        """Our update that a peer returned to us, if the signature is ours."""
        if signed is None or signed.manifest.update.peer != self._facts.us:
            return None
        sound = self._manifests.refusal(signed) is None
        return signed.manifest.update if sound else None

    def _refuse_second_node(self, peer: PeerName, boot_id: str) -> None:
        """Refuse messages of an earlier start: a second node is running with the same keys."""
        boots = self._boots.setdefault(peer, deque(maxlen=BOOTS_KEPT))
        if boot_id and boot_id not in boots:
            boots.append(boot_id)
        elif boot_id and boot_id != boots[-1]:
            advice = (
                "; only the node that was started last is heard: stop the other one, and never copy"
                " keys to a second machine"
            )
            raise PeerMisbehaved(
                peer,
                Reason.IDENTITY,
                "another node is running with its keys" + advice,
                message_for_peer="another node is running with our keys" + advice,
            )

    # Our own messages.

    def greeting(self, peer: PeerName, *, probe: bool = False) -> Hello:
        """The `Hello` that we send to a peer now."""
        facts, state = self._facts, self._state()
        return Hello(
            version_min=PROTOCOL_VERSION,
            version_max=PROTOCOL_VERSION,
            federation=facts.federation,
            agreement=facts.agreement,
            schema=facts.schema,
            initial_model=facts.initial_model,
            round=state.round,
            boot_id=facts.boot_id,
            wall_time_ns=self._wall_ns(),
            lamport=state.stamp,
            probe=probe,
            yours=self._manifests.newest_of(peer),
            clauses=facts.clauses,
            your_head=self._peer_memory.head_of(peer),
        )

    def _announcement(self, peer: PeerName) -> Announcement:
        state = self._state()
        if state.latest is not None and state.latest.manifest.update.digest not in self._own:
            self._own.append(state.latest.manifest.update.digest)
        seen = (self._manifests.find(update) for update in state.vouched)
        return Announcement(
            lamport=state.stamp,
            round=state.round,
            phase=state.phase,
            latest=state.latest,
            seen=tuple(signed for signed in seen if signed is not None),
            evidence=state.evidence,
            head=state.head,
            progress=state.progress,
            opinion=self._peer_memory.opinion_of(peer),
            boot_id=self._facts.boot_id,
        )


def differences_text(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Which keys of two federation configs differ; a clause is one setting or one site."""
    words = [
        f"{_named(key)} is not the same"
        for key in sorted(ours.keys() & theirs.keys())
        if ours[key] != theirs[key]
    ]
    words += [f"{_named(key)} is only in ours" for key in sorted(ours.keys() - theirs.keys())]
    words += [f"{_named(key)} is only in its copy" for key in sorted(theirs.keys() - ours.keys())]
    if not words or not theirs:
        return "its peers.yaml says something else than ours"
    more = [f"and {len(words) - DIFFERENCES_MAX} more"] if len(words) > DIFFERENCES_MAX else []
    named = ", ".join([*words[:DIFFERENCES_MAX], *more])
    return f"its peers.yaml differs from ours: {named}"


def _named(key: str) -> str:
    return key.removeprefix("peers.") if key.startswith("peers.") else f"`{key}`"
