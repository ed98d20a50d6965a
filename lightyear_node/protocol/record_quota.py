"""How many journal records each peer may cause: a token bucket per peer.

Every later round or generation that a peer announces must be recorded before we report it.  An
honest peer causes about one record per round.  Tokens are refilled by time and by our own rounds.
A peer without tokens is still listened to and fetched from, but causes no records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from lightyear_node.types import PeerName

STOCK = 16
"""Size of the bucket: records that a peer may cause at once."""
PER_HOUR = 60.0
PER_ROUND = 4.0
"""Tokens per round of ours: a peer may be this many times faster than we are."""


class RecordQuota:
    def __init__(self) -> None:
        self.withheld: Counter[PeerName] = Counter()
        """Records that were not written because a peer had no tokens."""
        self._left: dict[PeerName, tuple[float, float]] = {}
        """Tokens of each peer, and the time at which they were counted."""

    def take(self, peer: PeerName, now: float) -> bool:
        """Take one of a peer's tokens; False if it has none."""
        left = self._at(peer, now)
        if left < 1.0:
            self.withheld[peer] += 1
            return False
        self._left[peer] = (left - 1.0, now)
        return True

    def round_done(self) -> None:
        """Refill after one of our own rounds."""
        for peer, (left, since) in self._left.items():
            self._left[peer] = (min(left + PER_ROUND, STOCK), since)

    def keep_only(self, peers: Collection[PeerName]) -> None:
        for peer in self._left.keys() - set(peers):
            del self._left[peer]
            self.withheld.pop(peer, None)

    def _at(self, peer: PeerName, now: float) -> float:
        left, since = self._left.get(peer, (float(STOCK), now))
        return min(left + max(0.0, now - since) * PER_HOUR / 3600.0, STOCK)
