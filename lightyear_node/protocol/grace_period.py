"""How long a round waits for late peers after `min_peers` have delivered (the quorum).

The configured grace period is the maximum.  For peers whose updates usually arrive soon after the
quorum, the wait is their usual delay plus a margin for its deviation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from lightyear_node.types import PeerName

SAMPLES = 8
SAMPLES_MIN = 3
DEVIATIONS = 4.0
"""Margin in median deviations: about 2.7 standard deviations of normally distributed delays."""
LEFT_OUT_FACTOR = 1.5
"""A peer that was not waited for is assumed to be this many times later than we waited."""


class GracePeriod:
    def __init__(self, grace_min_s: float, grace_s: float) -> None:
        self.grace_min_s = grace_min_s
        self.grace_s = grace_s
        self._late_s: dict[PeerName, deque[float]] = {}

    def arrived(self, peer: PeerName, late_s: float) -> None:
        """Record how long after the quorum an update arrived; 0 if it was part of the quorum."""
        self._late_s.setdefault(peer, deque(maxlen=SAMPLES)).append(late_s)

    def left_out(self, peer: PeerName, waited_s: float) -> None:
        """Record that a round closed without a peer after this wait."""
        self.arrived(peer, waited_s * LEFT_OUT_FACTOR)

    def reconfigure(self, grace_min_s: float, grace_s: float, peers: Iterable[PeerName]) -> None:
        """Use other limits, and forget all peers but these."""
        self.grace_min_s, self.grace_s = grace_min_s, grace_s
        members = set(peers)
        self._late_s = {peer: late for peer, late in self._late_s.items() if peer in members}

    def grace_for(self, peers: Iterable[PeerName]) -> float:
        """How many seconds after the quorum to wait for these peers."""
        expected_s = max((self._expected_s(peer) for peer in peers), default=0.0)
        return min(max(expected_s, self.grace_min_s), self.grace_s)

    def _expected_s(self, peer: PeerName) -> float:
        late = self._late_s.get(peer, ())
        if len(late) < SAMPLES_MIN:
            return self.grace_s
        middle = median(late)
        deviation = median(abs(late_s - middle) for late_s in late)
        return middle + DEVIATIONS * deviation + self.grace_min_s
