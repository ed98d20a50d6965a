"""Heartbeats: what this site tells its peers about itself, and when."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from lightyear_node.node.active_config import ActiveConfig
from lightyear_node.node.gossip import Gossip, LocalState
from lightyear_node.node.local_api import LocalApi
from lightyear_node.node.peer_connections import PeerConnections, Spawn
from lightyear_node.node.worker_activity import WorkerActivity
from lightyear_node.protocol.state_machine import Barrier
from lightyear_node.storage.round_journal import RoundJournal
from lightyear_node.transport.client import PeerClient
from lightyear_node.transport.limits import EVIDENCE_MAX
from lightyear_node.types import PeerName


@dataclass(eq=False, repr=False)
class OwnState:
    """This site's state as peers may see it.

    Whatever must survive a crash comes from the journal, not from the barrier: a peer never sees
    what is not yet durable.
    """

    _barrier: Barrier
    _round_journal: RoundJournal
    _active: ActiveConfig
    _activity: WorkerActivity
    _held: LocalState | None = field(init=False, default=None)

    def current(self) -> LocalState:
        """The state to announce now."""
        return self._held or self._read()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Announce the present state for as long as this context is open."""
        self._held = self._read()
        try:
            yield
        finally:
            self._held = None

    def _read(self) -> LocalState:
        journal = self._round_journal
        manifest = journal.manifest
        is_current = manifest is not None and manifest.manifest.update == journal.memory.announced
        # Peers ignore updates of sites that are not in their peers.yaml.
        members = self._active.parameters.peers
        vouched = [known for peer, known in journal.memory.vouched.items() if peer in members]
        return LocalState(
            self._barrier.round,
            self._barrier.phase,
            manifest if is_current else None,
            progress=self._activity.count,
            vouched=tuple(update for known in vouched for update in known),
            evidence=tuple(journal.evidence[:EVIDENCE_MAX]),
            head=journal.head,
            stamp=journal.length,
        )


@dataclass(eq=False, repr=False)
class Heartbeat:
    """Calls every peer at each heartbeat; a slow peer delays only its own next call."""

    _gossip: Gossip
    _connections: PeerConnections
    _local_api: LocalApi
    _active: ActiveConfig
    _spawn: Spawn
    _in_progress: set[PeerName] = field(init=False, default_factory=set)
    _next_beat: float = field(init=False, default=0.0)

    def contact_peers(self) -> None:
        """Call every peer that no earlier call is still under way to."""
        for peer, client in self._connections.clients.items():
            if peer not in self._in_progress:
                self._in_progress.add(peer)
                self._spawn(self._contact(peer, client))

    def loop_turned(self) -> None:
        """Report that the event loop is alive, and which strangers connected since."""
        self._local_api.turned()
        self._connections.report_strangers()

    def keep_alive(self) -> None:
        """Send due heartbeats while the event loop waits for disk space."""
        self.loop_turned()
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + self._active.parameters.heartbeat_s
            self.contact_peers()

    async def _contact(self, peer: PeerName, client: PeerClient) -> None:
        try:
            await self._gossip.contact(peer, client)
        finally:
            self._in_progress.discard(peer)
