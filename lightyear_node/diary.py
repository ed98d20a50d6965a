"""What is remembered of and for each peer besides its updates: its journal's head, its opinion.

Both sides of each: what we hold of a peer's journal and it of ours; what we think of its update
and it of ours.  Must not know how it travels.
"""

from __future__ import annotations

import contextlib

from lightyear_node.archive import Archive
from lightyear_node.errors import DiskFull
from lightyear_node.ledger import Ledger
from lightyear_node.observe.observer import Observer
from lightyear_node.records import Opinion, PeerName, SignedHead
from lightyear_node.witnesses import Witnesses


class Diary:
    def __init__(
        self,
        ledger: Ledger,
        witnesses: Witnesses,
        archive: Archive,
        observer: Observer,
        *,
        share_verdicts: bool,
    ) -> None:
        self._ledger = ledger
        self._witnesses = witnesses
        self._archive = archive
        self._observer = observer
        self._share_verdicts = share_verdicts

    def head(self) -> SignedHead | None:
        """What the others are to hold of our own journal."""
        return self._witnesses.ours()

    def head_of(self, peer: PeerName) -> SignedHead | None:
        return self._witnesses.held(peer)

    def hold(self, peer: PeerName, head: SignedHead) -> None:
        """A peer says how far its journal goes."""
        contradiction = self._witnesses.hold(peer, head, self._archive.keys_of(peer))
        if contradiction is not None:
            self._observer.rewritten(peer, contradiction)

    def claimed(self, peer: PeerName, head: SignedHead) -> None:
        """A peer says that it holds this head of our own journal."""
        problem = self._witnesses.claimed(peer, head)
        if problem is not None:
            self._observer.journal_broken(problem)

    def forget(self, peer: PeerName) -> None:
        """It has left, or begins a new journal."""
        self._witnesses.forget(peer)

    def opinion_of(self, peer: PeerName) -> Opinion | None:
        """What to tell a peer about its update, if this site shares that."""
        return self._ledger.opinion_of(peer) if self._share_verdicts else None

    def told(self, peer: PeerName, opinion: Opinion) -> None:
        """A peer says what it thinks of an update of ours."""
        with contextlib.suppress(DiskFull):  # it will say so again
            if self._ledger.told(peer, opinion):
                self._observer.opinion(peer, opinion)
