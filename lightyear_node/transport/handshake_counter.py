"""Counts connections that never became an authenticated call.

A TLS handshake fails inside gRPC, before any of our code runs, and gRPC does not report it.  But
gRPC asks for our certificate at the start of every handshake, and a known peer makes a call soon
after.  A handshake without a call came from an unknown client, or from one that spoke no TLS.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque

from lightyear_node.transport.limits import CONNECTIONS_KEPT, HANDSHAKES_KEPT


class HandshakeCounter:
    """gRPC's own threads call `handshake_started`; the event loop calls the other methods."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._started_at: deque[float] = deque()
        self._dropped = 0
        self._authenticated: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def pending(self) -> int:
        """Handshakes that no call has followed yet."""
        return len(self._started_at)

    def handshake_started(self, now: float) -> None:
        with self._lock:
            self._started_at.append(now)
            if len(self._started_at) > HANDSHAKES_KEPT:
                self._started_at.popleft()
                self._dropped += 1

    def call_received(self, connection: str) -> None:
        """Record a call; the first one on its connection completes a handshake."""
        with self._lock:
            if connection in self._authenticated:
                return
            self._authenticated[connection] = None
            if len(self._authenticated) > CONNECTIONS_KEPT:
                self._authenticated.popitem(last=False)
            if self._started_at:
                self._started_at.popleft()

    def take_failed(self, now: float) -> int:
        """Number of handshakes that have failed since the last call of this method."""
        with self._lock:
            failed, self._dropped = self._dropped, 0
            while self._started_at and now - self._started_at[0] > self._timeout_s:
                self._started_at.popleft()
                failed += 1
            return failed
