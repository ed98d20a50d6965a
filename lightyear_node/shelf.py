"""Which weights files are needed: what we offer, what differences are taken from, what may go.

Owns no file: the store has them, the ledger and the barrier say which are in use.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Set

from lightyear_node.errors import DiskFull
from lightyear_node.home import State
from lightyear_node.ledger import Ledger
from lightyear_node.records import Digest, PeerName, Update
from lightyear_node.space import Holdings, expendable
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
        self._received = state.updates.whole() - self._own()
        """Others' updates; at the start, whatever is there and is not ours."""
        self._in_use: Set[Digest] = frozenset()

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
        self._received.add(update.digest)
        if not self._delta:
            return
        before = self._bases.get(update.peer)
        self._bases[update.peer] = update.digest
        if before is not None and before not in self._updates(kept):
            self._state.updates.discard(before)

    def check(self) -> list[Digest]:
        """What the memory refers to must be there, and still be what its name says.

        Returns the damaged models before the first sound one, with which training can go on.
        """
        ledger, state = self._ledger, self._state
        if ledger.work is not None:
            state.check(state.updates, ledger.work.own, ledger.work.outgoing)
            state.check(state.carry, ledger.work.carry)
        damaged: list[Digest] = []
        for model in ledger.models:
            if state.models.verify(model):
                return damaged
            damaged.append(model)
        state.check(state.models, ledger.model)
        return damaged

    def use(self, updates: Iterable[Update]) -> None:
        """These are judged and merged now: they stay until the round is over."""
        self._in_use = frozenset(update.digest for update in updates)

    def tidy(self, kept: Set[Digest], peers: Collection[PeerName]) -> None:
        """Drop every file that no later step, nor a restart, can ask for."""
        self._bases = {peer: base for peer, base in self._bases.items() if peer in peers}
        self._in_use = frozenset()
        ledger = self._ledger
        assert ledger.work is not None
        with contextlib.suppress(DiskFull):  # some file systems need space to delete: next time
            self._state.retain(
                updates=self._updates(kept), models=ledger.kept_models, carry={ledger.work.carry}
            )
        self._received &= self._state.updates.whole()

    def make_room(
        self, kept: Set[Digest], enough: Callable[[], bool], *, for_ourselves: bool
    ) -> None:
        """The disk is full: drop others' updates, one by one, until it is not."""
        updates = self._state.updates
        holdings = Holdings(
            received=self._received,
            parts=updates.parts(),
            wanted=kept,
            needed=self._own() | self._in_use | updates.busy(),
        )
        for digest in expendable(holdings, for_ourselves=for_ourselves):
            if enough():
                return
            with contextlib.suppress(DiskFull):
                updates.discard(digest)
                self._received.discard(digest)

    def _updates(self, kept: Set[Digest]) -> Set[Digest]:
        return {*kept, *self._own(), *self._bases.values()}

    def _own(self) -> set[Digest]:
        return own_updates(self._ledger)


def own_updates(ledger: Ledger) -> set[Digest]:
    """The updates without which this site could not go on after a restart."""
    work, decision = ledger.work, ledger.memory.decision
    needed = {work.own, work.outgoing} if work is not None else set()
    merging = {update.digest for update in decision.accepted} if decision is not None else set()
    return {*needed, *merging, *ledger.offered}


def drop_leftovers(state: State) -> None:
    """Before the node has begun: whatever an earlier life has left and this one can do without."""
    ledger = Ledger(state.journal, wall_ns=lambda: 0, stamp=lambda: 0)
    carry = {ledger.work.carry} if ledger.work is not None else set()
    with contextlib.suppress(DiskFull):
        state.retain(
            updates=own_updates(ledger),
            # The first model of all is written, and not yet recorded.
            models=ledger.kept_models | state.models.busy(),
            carry=carry,
        )
