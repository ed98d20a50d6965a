"""Fetches peers' updates, and checks that stored ones are still intact."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from lightyear_node.errors import PeerError, PeerMisbehaved, Shortage
from lightyear_node.node.inbox import Inbox
from lightyear_node.node.peer_connections import PeerConnections
from lightyear_node.node.retention import Retention
from lightyear_node.observe.metrics import RECEIVED
from lightyear_node.observe.observer import Observer
from lightyear_node.protocol.events import Answered, Fetched, FetchFailed
from lightyear_node.protocol.manifests import ManifestStore
from lightyear_node.protocol.state_machine import Barrier
from lightyear_node.storage.disk_space import DiskSpace
from lightyear_node.transport.codec import ChunkGrid
from lightyear_node.types import CHUNK_BYTES, Digest, PeerName, Reason, Update


@dataclass(eq=False, repr=False)
class Downloads:
    _barrier: Barrier
    _manifests: ManifestStore
    _retention: Retention
    _connections: PeerConnections
    _disk_space: DiskSpace
    _observer: Observer
    _inbox: Inbox
    _grid: ChunkGrid

    def __post_init__(self) -> None:
        self._updates = self._retention.updates

    async def fetch(self, update: Update) -> None:
        """Fetch an update; ends with one `Fetched` or `FetchFailed` event."""
        done = self._inbox.put
        if self._updates.size(update.digest) == self._grid.raw_bytes:
            self._retention.received(update, self._barrier.kept())
            done(Fetched(update))
            return
        if self._manifests.find(update) is None:
            # Replaced by newer ones, which are about to reach the barrier.
            done(FetchFailed(update, Reason.STALE_ROUND, retriable=True))
            return
        try:
            await self._transfer(update)
        except Shortage as problem:
            self._observer.peers.transfer_failed(update.peer, Reason.DISK_FULL, str(problem))
            done(FetchFailed(update, Reason.DISK_FULL, retriable=True))
        except PeerError as problem:
            self._observer.peers.transfer_failed(update.peer, problem.reason, str(problem))
            # Bytes that arrived complete and were wrong will not be right another time.
            retriable = not isinstance(problem, PeerMisbehaved)
            done(FetchFailed(update, problem.reason, retriable))
        else:
            done(Fetched(update))

    async def lost(self, updates: Sequence[Update]) -> dict[PeerName, Reason]:
        """The updates that are not here as they were signed, even after fetching them again.

        Hashing costs a second per GiB, next to reading the files several times; without it, a bit
        that flipped on our own disk would be blamed on the peer.
        """
        lost = {}
        for update in updates:
            verify = partial(asyncio.to_thread, self._updates.verify, update.digest)
            if not self._updates.has(update.digest):
                lost[update.peer] = Reason.UNSCORED  # deleted when the disk was full
            elif not await self._disk_space.retry("checking an update", verify):
                lost[update.peer] = Reason.DAMAGED
                self._damaged("update", update.digest)
        again = [update for update in updates if update.peer in lost]
        await asyncio.gather(*map(self._fetch_again, again))
        here = [update.peer for update in again if self._updates.has(update.digest)]
        return {peer: reason for peer, reason in lost.items() if peer not in here}

    def samples_of(self, update: Update) -> int:
        """The number of training samples that the peer states in its manifest."""
        signed = self._manifests.find(update)
        return signed.manifest.samples if signed else 0

    async def _transfer(self, update: Update) -> None:
        updates = self._updates
        async with self._connections.fetch_slots:
            client = self._connections.clients.get(update.peer)
            signed = self._manifests.find(update)
            if client is None or signed is None:
                raise PeerError(update.peer, Reason.BLOCKED, "no longer in peers.yaml")
            self._retention.expecting(update, self._barrier.kept())
            here = updates.partial_chunks(update.digest, signed.manifest.raw_bytes) * CHUNK_BYTES
            try:
                with self._disk_space.downloading(max(0, signed.manifest.raw_bytes - here)):
                    transfer = await client.fetch(
                        signed.manifest,
                        updates,
                        self._grid,
                        partial(self._progressed, update.peer),
                        partial(self._observer.peers.resumed, update.peer),
                        partial(self._damaged, "base"),
                    )
            finally:
                self._observer.current_jobs.arrived(update.peer)
        self._observer.peers.transferred(update.peer, RECEIVED, transfer)
        self._retention.received(update, self._barrier.kept())

    async def _fetch_again(self, update: Update) -> None:
        """Fetch an update that is about to be judged or merged, within one grace period."""

        async def transfer() -> None:
            async with asyncio.timeout(self._barrier.parameters.grace_s):
                await self._transfer(update)

        with contextlib.suppress(PeerError, TimeoutError):
            await self._disk_space.retry("a peer's update", transfer)

    def _damaged(self, kind: str, digest: Digest) -> None:
        """Drop a stored file whose content changed on our own disk."""
        self._observer.damaged(kind, str(self._updates.path(digest)))
        self._retention.discard(digest)

    def _progressed(self, peer: PeerName, done: int, total: int) -> None:
        """A chunk is a sign of life: on a slow link a heartbeat's answer may queue behind it."""
        self._inbox.hear(Answered(peer))
        self._observer.peers.sending(peer)
        self._observer.current_jobs.arriving(peer, done, total)
