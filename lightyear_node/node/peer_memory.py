"""What is stored about each peer besides its updates: journal heads and shared verdicts.

Both in both directions: the head of a peer's journal and the head of ours that it holds; our
verdict on its update and its verdict on ours.  Must not know how they are sent.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from lightyear_node.errors import JournalCorrupt, Shortage
from lightyear_node.node.journal_witness import JournalWitness
from lightyear_node.observe.observer import Observer
from lightyear_node.protocol.manifests import ManifestStore
from lightyear_node.storage.round_journal import RoundJournal
from lightyear_node.types import Opinion, PeerName, SignedHead


@dataclass(eq=False, repr=False)
class PeerMemory:
    _round_journal: RoundJournal
    _witness: JournalWitness
    _manifests: ManifestStore
    _observer: Observer
    _share_verdicts: bool

    def head_of(self, peer: PeerName) -> SignedHead | None:
        return self._witness.held(peer)

    def hold(self, peer: PeerName, head: SignedHead) -> None:
        """Store the head of a peer's journal; report a rewritten one."""
        contradiction = self._witness.hold(peer, head, self._manifests.keys_of(peer))
        if contradiction is not None:
            self._observer.peers.rewritten(peer, contradiction)

    def claimed(self, peer: PeerName, head: SignedHead) -> None:
        """Check a head of our own journal that a peer holds."""
        with contextlib.suppress(Shortage, JournalCorrupt):  # the node reports these itself
            problem = self._witness.claimed(peer, head)
            if problem is not None:
                self._observer.journal_broken(problem, peer)

    def forget(self, peer: PeerName) -> None:
        """Drop what is stored about a peer that has left or begun a new journal."""
        self._witness.forget(peer)

    def opinion_of(self, peer: PeerName) -> Opinion | None:
        """Our verdict on the peer's update, if this site shares verdicts."""
        return self._round_journal.opinion_of(peer) if self._share_verdicts else None

    def store_opinion(self, peer: PeerName, opinion: Opinion) -> None:
        """Record a peer's verdict on an update of ours."""
        with contextlib.suppress(Shortage, JournalCorrupt):  # the peer repeats it
            if self._round_journal.record_opinion(peer, opinion):
                self._observer.peers.opinion(peer, opinion)
