"""How long a round waits for those who are still missing when enough are here.

The configured grace is the longest.  Peers whose updates usually come soon after the quorum are
given as long as they usually take, with room for their deviation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from lightyear_node.records import PeerName

SAMPLES = 8
SAMPLES_MIN = 3
DEVIATIONS = 4.0
"""Of the median deviation: for normally distributed delays, some 2.7 standard deviations."""
LATER = 1.5
"""Whoever was not waited for would have come later than this many times what we waited."""


class Patience:
    def __init__(self, grace_min_s: float, grace_s: float) -> None:
        self.grace_min_s = grace_min_s
        self.grace_s = grace_s
        self._late_s: dict[PeerName, deque[float]] = {}

    def arrived(self, peer: PeerName, late_s: float) -> None:
        """An update came so long after the quorum; 0 for one that was part of it."""
        self._late_s.setdefault(peer, deque(maxlen=SAMPLES)).append(late_s)

    def left_out(self, peer: PeerName, waited_s: float) -> None:
        self.arrived(peer, waited_s * LATER)

    def reform(self, grace_min_s: float, grace_s: float, peers: Iterable[PeerName]) -> None:
        """Other terms, and maybe other members."""
        self.grace_min_s, self.grace_s = grace_min_s, grace_s
        here = set(peers)
        self._late_s = {peer: late for peer, late in self._late_s.items() if peer in here}

    def grace_for(self, peers: Iterable[PeerName]) -> float:
        """How long after the quorum these peers may take, as far as we know them."""
        expected_s = max((self._expected_s(peer) for peer in peers), default=0.0)
        return min(max(expected_s, self.grace_min_s), self.grace_s)

    def _expected_s(self, peer: PeerName) -> float:
        late = self._late_s.get(peer, ())
        if len(late) < SAMPLES_MIN:
            return self.grace_s
        middle = median(late)
        deviation = median(abs(late_s - middle) for late_s in late)
        return middle + DEVIATIONS * deviation + self.grace_min_s
