"""Limits the connections of strangers: those without a call of a known peer.

gRPC accepts every connection and keeps it until its handshake ends or times out; a few hundred
silent ones would take every file descriptor of the process.  There is a limit in total and one per
address; beyond them the oldest are closed, so that a peer can always connect.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator

from lightyear_node.storage.file_descriptors import ConnectionShare
from lightyear_node.transport.limits import STRANGERS_BURST, STRANGERS_BURST_S
from lightyear_node.transport.sockets import close_connections, list_connections, normalized


class StrangerLimits:
    """gRPC's own threads call `connection_opened`; the event loop calls the other methods."""

    def __init__(self) -> None:
        self._port: int | None = None
        self._limits = (0, 0)
        self._authenticated: set[str] = set()
        self._strangers: dict[str, None] = {}
        """Connections without a call, the oldest first."""
        self._closing: set[str] = set()
        self._opened = 0
        self._checked_at = 0.0
        self._closed = 0
        self._lock = threading.Lock()
        self._checking = threading.Lock()

    def set_limits(self, share: ConnectionShare, peers: int) -> None:
        """Set the limits in total and per address; all peers may share one gateway's address."""
        per_address = max(share.strangers // 4, min(2 * peers, share.strangers))
        self._limits = (share.strangers, per_address)

    def set_port(self, port: int) -> None:
        self._port = port

    def connection_opened(self) -> None:
        with self._lock:
            self._opened += 1
            burst = (
                self._opened >= STRANGERS_BURST
                and time.monotonic() > self._checked_at + STRANGERS_BURST_S
            )
        if burst:
            self.enforce()

    def call_received(self, connection: str) -> None:
        """Record that a known peer has made a call on this connection."""
        with self._lock:
            self._authenticated.add(normalized(connection))

    def forget(self, connections: Iterable[str]) -> None:
        """Treat these connections as strangers again."""
        with self._lock:
            self._authenticated -= {normalized(connection) for connection in connections}

    def enforce(self) -> None:
        """Close the excess; does nothing without new connections.  Never raises OSError."""
        if self._port is None or not (self._opened or self._strangers or self._closing):
            return
        if not self._checking.acquire(blocking=False):
            return  # another thread is checking
        try:
            with self._lock:
                self._opened, authenticated = 0, set(self._authenticated)
                self._checked_at = time.monotonic()
            current = list_connections(self._port)
            with self._lock:
                # Those known before the listing and not in it have ended.
                self._authenticated -= authenticated - current
                strangers = current - self._authenticated
            excess = self._excess(strangers)
            # Repeated for those already closed: a new connection may have the same remote port.
            close_connections(excess | self._closing)
            self._closing |= excess
            with self._lock:
                self._closed += len(excess)
        finally:
            self._checking.release()

    def take_closed(self) -> int:
        """Number of connections closed since the last call of this method."""
        with self._lock:
            closed, self._closed = self._closed, 0
        return closed

    def _excess(self, strangers: set[str]) -> set[str]:
        self._closing &= strangers
        waiting = strangers - self._closing
        kept = [name for name in self._strangers if name in waiting]
        # New ones are appended in set order, which a client cannot choose.
        self._strangers = dict.fromkeys([*kept, *(waiting - set(kept))])
        total_max, per_address_max = self._limits
        by_address = defaultdict(list)
        for name in self._strangers:
            by_address[name.rpartition(":")[0]].append(name)
        excess = set(_oldest_beyond(by_address.values(), per_address_max))
        remaining = [name for name in self._strangers if name not in excess]
        excess |= set(_oldest_beyond([remaining], total_max))
        for name in excess:
            del self._strangers[name]
        return excess


def _oldest_beyond(groups: Iterable[list[str]], count_max: int) -> Iterator[str]:
    for group in groups:
        yield from group[: max(0, len(group) - count_max)]
