"""Retention of weights files: which are offered to peers, serve as delta bases, or may be deleted.

Owns no file: the blob store has them; the round journal and the barrier define which are in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Set

from lightyear_node.errors import DamagedFile, PeerError, Shortage
from lightyear_node.storage.blobs import BlobStore
from lightyear_node.storage.disk_space import expendable
from lightyear_node.storage.round_journal import RoundJournal
from lightyear_node.storage.state_directory import StateDirectory
from lightyear_node.transport.codec import ChunkGrid
from lightyear_node.transport.upload_cache import Upload, UploadBase
from lightyear_node.types import Digest, PeerName, Reason, Update

_log = logging.getLogger(__name__)


class Retention:
    def __init__(
        self, state: StateDirectory, round_journal: RoundJournal, grid: ChunkGrid, *, delta: bool
    ) -> None:
        self._state = state
        self._round_journal = round_journal
        self._grid = grid
        self._delta = delta
        self._bases: dict[PeerName, Digest] = {}
        """Each peer's newest received update: the next one is sent as a difference from it."""
        self._received = state.updates.complete_files() - own_updates(self._round_journal)
        """Peers' updates; at the start, every stored one that is not ours."""
        self._in_use: Set[Digest] = frozenset()
        self._files: dict[PeerName, set[Digest]] = {}
        """Each peer's complete and partial files that may still be stored."""
        self._warned_about: Digest | None = None

    @property
    def updates(self) -> BlobStore:
        return self._state.updates

    def largest_carry(self) -> int:
        """The size of the largest stored training state, in bytes."""
        return self._state.carry.largest()

    def base(self) -> Digest | None:
        """Our newest announced update: the delta base of the one that is being sealed."""
        return next(iter(self._round_journal.offered), None) if self._delta else None

    async def offer(self, peer: PeerName, digest: Digest) -> Upload | None:
        """The update with this digest, if we have announced it and the peer may have it."""
        memory = self._round_journal.memory
        if peer in memory.blocked:
            raise PeerError(peer, Reason.BLOCKED, "an operator here has blocked you")
        if peer in memory.quarantined:
            raise PeerError(peer, Reason.QUARANTINED, "you have signed two updates of one round")
        updates = self._state.updates
        if digest not in self._round_journal.offered or not updates.has(digest):
            return None
        # Cached since sealing; after a restart the file is hashed again.
        chunk_digests = await asyncio.to_thread(updates.chunk_digests, digest)
        latest = self._round_journal.manifest
        base = None
        if latest is not None and latest.manifest.update.digest == digest and latest.manifest.base:
            base = await self._own_base(latest.manifest.base)
        return Upload(digest, updates.path(digest), chunk_digests, self._grid, base)

    async def _own_base(self, digest: Digest) -> UploadBase | None:
        """Our previous update if it is intact; without it the new one is sent in full."""
        updates = self._state.updates
        try:
            chunk_digests = await asyncio.to_thread(updates.chunk_digests, digest)
        except DamagedFile as problem:
            if self._warned_about != digest:
                self._warned_about = digest
                text = "%s: our update is sent in full"
                _log.warning(text, problem, extra={"event": "damaged"})
            return None
        return UploadBase(updates.path(digest), chunk_digests)

    def expecting(self, update: Update, kept: Set[Digest]) -> None:
        """Delete what an update supersedes that is about to be fetched.

        However often a peer announces another update, at most one of its partial files is kept, and
        no more complete ones than are in use.
        """
        self._files.setdefault(update.peer, set()).add(update.digest)
        self._drop_superseded(update, kept)

    def received(self, update: Update, kept: Set[Digest]) -> None:
        """A peer's update is complete: it is the delta base of the next one."""
        self._received.add(update.digest)
        self._files.setdefault(update.peer, set()).add(update.digest)
        if self._delta:
            self._bases[update.peer] = update.digest
        self._drop_superseded(update, kept)

    def _drop_superseded(self, update: Update, kept: Set[Digest]) -> None:
        """Delete only this peer's files: our own training result is not recorded yet."""
        files = self._files[update.peer]
        others = [known for peer, known in self._files.items() if peer != update.peer]
        needed = {update.digest, *self._own_files(), *self._in_use}.union(*others)
        whole = {digest for digest in files if self._state.updates.has(digest)}
        # A partial file only serves to resume the newest update.
        for digest in files - needed - (whole & self._updates(kept)):
            with contextlib.suppress(Shortage):
                self._state.updates.discard(digest)
                self._received.discard(digest)
                files.discard(digest)

    def discard(self, digest: Digest) -> None:
        """Delete a damaged update of a peer; our own stay, damaged or not."""
        if digest in self._own_files():
            return
        self._received.discard(digest)
        for files in self._files.values():
            files.discard(digest)
        self._bases = {peer: base for peer, base in self._bases.items() if base != digest}
        with contextlib.suppress(Shortage):
            self._state.updates.discard(digest)

    def check(self) -> list[Digest]:
        """Verify the files that the journal refers to.

        Returns the damaged models before the newest intact one, from which training can continue.
        """
        round_journal, state = self._round_journal, self._state
        if round_journal.work is not None:
            state.check(state.updates, round_journal.work.own, round_journal.work.outgoing)
            state.check(state.carry, round_journal.work.carry)
        damaged: list[Digest] = []
        for model in round_journal.models:
            if state.models.verify(model):
                return damaged
            damaged.append(model)
        state.check(state.models, round_journal.model)
        return damaged

    def use(self, updates: Iterable[Update]) -> None:
        """Keep these updates until the round is over: they are being judged and merged."""
        self._in_use = frozenset(update.digest for update in updates)

    def tidy(self, kept: Set[Digest], peers: Collection[PeerName]) -> None:
        """Delete every file that no later step and no restart can need."""
        self._bases = {peer: base for peer, base in self._bases.items() if peer in peers}
        self._in_use = frozenset()
        round_journal = self._round_journal
        assert round_journal.work is not None
        # Some file systems need space to delete; this is retried after the next round.
        with contextlib.suppress(Shortage):
            self._state.retain(
                updates=self._updates(kept),
                models=round_journal.kept_models,
                carry={round_journal.work.carry},
            )
            whole, parts = self._state.updates.complete_files(), self._state.updates.partial_files()
            self._received &= whole
            self._files = {
                peer: files & (whole | parts)
                for peer, files in self._files.items()
                if peer in peers
            }

    def make_room(
        self, kept: Set[Digest], enough: Callable[[], bool], *, for_ourselves: bool
    ) -> None:
        """Delete peers' updates one by one until there is enough disk space."""
        updates = self._state.updates
        try:
            parts = updates.partial_files()
        except Shortage:  # too many open files; retried later
            return
        order = expendable(
            received=self._received,
            parts=parts,
            wanted=kept,
            needed=own_updates(self._round_journal) | self._in_use | updates.in_use(),
            for_ourselves=for_ourselves,
        )
        for digest in order:
            if enough():
                return
            with contextlib.suppress(Shortage):
                updates.discard(digest)
                self._received.discard(digest)

    def _updates(self, kept: Set[Digest]) -> Set[Digest]:
        return {*kept, *own_updates(self._round_journal), *self._bases.values()}

    def _own_files(self) -> set[Digest]:
        """The updates that this site has trained, sealed or not."""
        work = self._round_journal.work
        made = {work.own, work.outgoing} if work is not None else set()
        in_use = self._state.updates.in_use() - self._received
        return {*made, *self._round_journal.offered} | in_use


def own_updates(round_journal: RoundJournal) -> set[Digest]:
    """The updates that a restart needs."""
    work, decision = round_journal.work, round_journal.memory.decision
    needed = {work.own, work.outgoing} if work is not None else set()
    merging = {update.digest for update in decision.accepted} if decision is not None else set()
    return {*needed, *merging, *round_journal.offered}


def drop_leftovers(state: StateDirectory) -> None:
    """Before the rounds begin: delete the files that a restart does not need."""
    round_journal = RoundJournal(state.journal, wall_ns=lambda: 0)
    carry = {round_journal.work.carry} if round_journal.work is not None else set()
    with contextlib.suppress(Shortage):
        state.retain(
            updates=own_updates(round_journal),
            # The first model of all is written, and not yet recorded.
            models=round_journal.kept_models | state.models.in_use(),
            carry=carry,
        )
