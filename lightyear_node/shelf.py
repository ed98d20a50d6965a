"""Which weights files are needed: what we offer, what differences are taken from, what may go.

Owns no file: the store has them, the ledger and the barrier say which are in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Set

from lightyear_node.home import State
from lightyear_node.ledger import Ledger
from lightyear_node.records import Digest, PeerName, Update
from lightyear_node.transport.codec import Grid
from lightyear_node.transport.outbox import Offer


class Shelf:
    def __init__(self, state: State, ledger: Ledger, grid: Grid, *, delta: bool) -> None:
        self._state = state
        self._ledger = ledger
        self._grid = grid
        self._delta = delta
        self._bases: dict[PeerName, Digest] = {}
        """Of each peer the last update that came: the next one is only a difference from it."""

    def base(self) -> Digest | None:
        """Our last update, from which the next one is a small step; to be asked before sealing."""
        return next(iter(self._ledger.offered), None) if self._delta else None

    async def offer(self, digest: Digest) -> Offer | None:
        """Only what we have announced: other sites' updates are not ours to give."""
        updates = self._state.updates
        if digest not in self._ledger.offered or not updates.has(digest):
            return None
        # Known by heart for what we sealed in this life; after a restart the file is read again.
        chunk_digests = await asyncio.to_thread(updates.chunk_digests, digest)
        latest = self._ledger.manifest
        base = None
        if latest is not None and latest.manifest.update.digest == digest and latest.manifest.base:
            base = updates.path(latest.manifest.base)
        return Offer(digest, updates.path(digest), chunk_digests, self._grid, base)

    def received(self, update: Update, kept: Set[Digest]) -> None:
        """The base of a peer's next update has come; the one before has served its purpose.

        Not a moment for more tidying: what is just being trained is known to nobody yet.
        """
        if not self._delta:
            return
        before = self._bases.get(update.peer)
        self._bases[update.peer] = update.digest
        if before is not None and before not in self._updates(kept):
            self._state.updates.discard(before)

    def check(self) -> None:
        """What the memory refers to must be there, and still be what its name says."""
        work, state = self._ledger.work, self._state
        state.check(state.models, self._ledger.model)
        if work is not None:
            state.check(state.updates, work.own, work.outgoing)
            state.check(state.carry, work.carry)

    def tidy(self, kept: Set[Digest], peers: Collection[PeerName]) -> None:
        """Drop every file that no later step, nor a restart, can ask for."""
        self._bases = {peer: base for peer, base in self._bases.items() if peer in peers}
        ledger = self._ledger
        assert ledger.work is not None
        self._state.retain(
            updates=self._updates(kept), models=set(ledger.models), carry={ledger.work.carry}
        )

    def _updates(self, kept: Set[Digest]) -> Set[Digest]:
        own = {self._ledger.work.own} if self._ledger.work is not None else set()
        return {*kept, *own, *self._ledger.offered, *self._bases.values()}
