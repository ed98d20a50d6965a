"""Metrics with series for each peer of peers.yaml, and for nobody else.

They come with the peer, at zero, and go with it.  What is still told about a peer that has gone
is counted nowhere: a late word must not bring its series back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge

from lightyear_node.records import PeerName

M = TypeVar("M", Counter, Gauge)
NO_LABELS: Sequence[tuple[str, ...]] = ((),)


class PerPeer(Generic[M]):
    """`labels` are those besides `peer`, and `values` all that they can be together."""

    def __init__(
        self,
        kind: type[M],
        name: str,
        about: str,
        registry: CollectorRegistry | None,
        labels: Sequence[str] = (),
        values: Sequence[tuple[str, ...]] = NO_LABELS,
        start: float = 0.0,
    ) -> None:
        self._metric: M = kind(name, about, ("peer", *labels), registry=registry)
        self._nowhere: M = kind(name, about, registry=None)
        self._values = frozenset(values)
        self._start = start
        self._here: set[PeerName] = set()

    def admit(self, peer: PeerName) -> None:
        self._here.add(peer)
        for values in self._values:
            child = self._metric.labels(peer, *values)
            if isinstance(child, Gauge):
                child.set(self._start)

    def dismiss(self, peer: PeerName) -> None:
        if peer in self._here:
            self._here.remove(peer)
            for values in self._values:
                self._metric.remove(peer, *values)

    def of(self, peer: PeerName, *values: str) -> M:
        """The series to write to; a value that was not foreseen has none either."""
        if peer not in self._here or values not in self._values:
            return self._nowhere
        return self._metric.labels(peer, *values)
