"""Limits the calls of each peer: how many at once, and how often.

Owns the counters; must not know what is requested.  A peer over a limit is refused alone: no limit
can be exhausted by some peers for the others, as long as no more are faulty than the federation
tolerates.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from enum import StrEnum

from lightyear_node.transport import limits
from lightyear_node.transport.limits import TokenBucket
from lightyear_node.types import PeerName


class RequestKind(StrEnum):
    """The RPCs of a peer; hello, announce and fetch are also the kinds of a reverse call."""

    HELLO = "hello"
    ANNOUNCE = "announce"
    FETCH = "fetch"
    REVERSE_STREAM = "lend"


CONCURRENT_MAX = {
    RequestKind.HELLO: limits.CALLS_PER_PEER_MAX,
    RequestKind.ANNOUNCE: limits.CALLS_PER_PEER_MAX,
    RequestKind.FETCH: limits.FETCHES_PER_PEER_MAX,
    RequestKind.REVERSE_STREAM: limits.REVERSE_STREAMS_PER_PEER_MAX,
}


class RateLimits:
    """To be used within one event loop; callers pass the time."""

    def __init__(self, faulty_max: int = 0) -> None:
        self._fetches_max = limits.FETCHES_MAX + limits.FETCHES_PER_PEER_MAX * faulty_max
        self._buckets: dict[tuple[PeerName, RequestKind], TokenBucket] = {}
        self._running: Counter[tuple[PeerName, RequestKind]] = Counter()
        self._strikes: dict[PeerName, deque[float]] = {}
        self._cooling_until: dict[PeerName, float] = {}

    def forget_all_but(self, peers: Iterable[PeerName]) -> None:
        """Drop the counters of all other peers, so that memory is bounded by the peers."""
        kept = set(peers)
        for table in (self._strikes, self._cooling_until):
            for peer in table.keys() - kept:
                del table[peer]
        for key in [key for key in self._buckets if key[0] not in kept]:
            del self._buckets[key]

    @contextlib.contextmanager
    def count_call(self, peer: PeerName, kind: RequestKind) -> Iterator[str | None]:
        """Count one call while it runs; yields the reason to refuse it, or None."""
        full = self._running[peer, kind] >= CONCURRENT_MAX[kind]
        if kind is RequestKind.FETCH:
            fetches = sum(
                count for (_, other), count in self._running.items() if other is RequestKind.FETCH
            )
            full = full or fetches >= self._fetches_max
        if full:
            yield "too_many_fetches" if kind is RequestKind.FETCH else "too_many_calls"
            return
        self._running[peer, kind] += 1
        try:
            yield None
        finally:
            self._running[peer, kind] -= 1

    def rate_exceeded(self, peer: PeerName, kind: RequestKind, now: float) -> str | None:
        """The reason to refuse a call that comes too early, or None."""
        if now < self._cooling_until.get(peer, now):
            return "cooling_down"
        bucket = self._buckets.get((peer, kind))
        if bucket is None:
            bucket = TokenBucket(limits.CALLS_PER_S, limits.CALLS_BURST)
            self._buckets[peer, kind] = bucket
        return None if bucket.take(now) else "too_often"

    def strike(self, peer: PeerName, now: float) -> bool:
        """Record a malformed message; True if the peer's calls are now refused for a while."""
        strikes = self._strikes.setdefault(peer, deque(maxlen=limits.STRIKES_MAX))
        strikes.append(now)
        if len(strikes) < limits.STRIKES_MAX or now - strikes[0] > limits.STRIKES_S:
            return False
        self._cooling_until[peer] = now + limits.COOL_DOWN_S
        strikes.clear()
        return True
