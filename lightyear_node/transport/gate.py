"""How much one peer may ask of us, and how often.

Owns the counting; must not know what is asked.  A peer that is over a limit is denied alone: there
is no limit that some peers could use up for the others, as long as no more of them are faulty than
the federation allows for.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from enum import StrEnum

from lightyear_node.records import PeerName
from lightyear_node.transport import limits
from lightyear_node.transport.limits import TokenBucket


class Ask(StrEnum):
    """What a peer can ask for."""

    HELLO = "hello"
    ANNOUNCE = "announce"
    FETCH = "fetch"
    LEND = "lend"


AT_ONCE = {
    Ask.HELLO: limits.CALLS_PER_PEER_MAX,
    Ask.ANNOUNCE: limits.CALLS_PER_PEER_MAX,
    Ask.FETCH: limits.FETCHES_PER_PEER_MAX,
    Ask.LEND: limits.LENT_PER_PEER_MAX,
}


class Gate:
    """To be used within one event loop; callers bring the time."""

    def __init__(self, faulty_max: int = 0) -> None:
        self._fetches_max = limits.FETCHES_MAX + limits.FETCHES_PER_PEER_MAX * faulty_max
        self._buckets: dict[tuple[PeerName, Ask], TokenBucket] = {}
        self._open: Counter[tuple[PeerName, Ask]] = Counter()
        self._strikes: dict[PeerName, deque[float]] = {}
        self._cooling_until: dict[PeerName, float] = {}

    def keep(self, peers: Iterable[PeerName]) -> None:
        """Forget everybody else, so that memory is bounded by the number of peers."""
        kept = set(peers)
        for table in (self._strikes, self._cooling_until):
            for peer in table.keys() - kept:
                del table[peer]
        for name in [name for name in self._buckets if name[0] not in kept]:
            del self._buckets[name]

    @contextlib.contextmanager
    def enter(self, peer: PeerName, ask: Ask) -> Iterator[str | None]:
        """Count one call for as long as it runs; yields why it is denied, or None."""
        full = self._open[peer, ask] >= AT_ONCE[ask]
        if ask is Ask.FETCH:
            fetches = sum(count for (_, one), count in self._open.items() if one is Ask.FETCH)
            full = full or fetches >= self._fetches_max
        if full:
            yield "too_many_fetches" if ask is Ask.FETCH else "too_many_calls"
            return
        self._open[peer, ask] += 1
        try:
            yield None
        finally:
            self._open[peer, ask] -= 1

    def hurried(self, peer: PeerName, ask: Ask, now: float) -> str | None:
        """Why a call that is wanted now comes too early, or None."""
        if now < self._cooling_until.get(peer, now):
            return "cooling_down"
        bucket = self._buckets.get((peer, ask))
        if bucket is None:
            bucket = TokenBucket(limits.CALLS_PER_S, limits.CALLS_BURST)
            self._buckets[peer, ask] = bucket
        return None if bucket.take(now) else "too_often"

    def strike(self, peer: PeerName, now: float) -> bool:
        """Note a message that no honest site sends; True if the peer is now left to cool down."""
        strikes = self._strikes.setdefault(peer, deque(maxlen=limits.STRIKES_MAX))
        strikes.append(now)
        if len(strikes) < limits.STRIKES_MAX or now - strikes[0] > limits.STRIKES_S:
            return False
        self._cooling_until[peer] = now + limits.COOL_DOWN_S
        strikes.clear()
        return True
