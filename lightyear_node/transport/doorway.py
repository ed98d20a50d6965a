"""Counts who was turned away at the door.

A stranger's TLS handshake fails inside gRPC, before any of our code runs, and gRPC tells nobody.
But it asks for our certificate at the beginning of every handshake, and a known peer's connection
soon makes a call.  A beginning without a call was a stranger, or something that spoke no TLS.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque

CONNECTIONS_KEPT = 1024
"""Remote addresses remembered as let in; a federation has at most a few per peer."""
KNOCKS_KEPT = 4096
"""Handshakes under way at once; of a larger crowd the first are given up."""


class Doorway:
    """`knock` comes from gRPC's own threads, the rest from the event loop."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._knocks: deque[float] = deque()
        self._crowd = 0
        self._inside: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def knock(self, now: float) -> None:
        with self._lock:
            self._knocks.append(now)
            if len(self._knocks) > KNOCKS_KEPT:
                self._knocks.popleft()
                self._crowd += 1

    def enter(self, connection: str) -> None:
        """A known peer has made a call; the first one on its connection answers for a knock."""
        with self._lock:
            if connection in self._inside:
                return
            self._inside[connection] = None
            if len(self._inside) > CONNECTIONS_KEPT:
                self._inside.popitem(last=False)
            if self._knocks:
                self._knocks.popleft()

    def turned_away(self, now: float) -> int:
        """How many have knocked and not entered since this was last asked."""
        with self._lock:
            count, self._crowd = self._crowd, 0
            while self._knocks and now - self._knocks[0] > self._patience_s:
                self._knocks.popleft()
                count += 1
            return count
