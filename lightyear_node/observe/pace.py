"""How far the work at hand is, how fast it goes, and how long it will take.

Must not know what the work is.  Time is an argument of `Pace`; only `UnderWay`, which the node
feeds, reads the clock.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from lightyear_node.records import PeerName

RECENT = 32
"""Reports of progress that a rate is taken from: the newest count, since lines and loads change."""


class Pace:
    """One piece of work, from its first report on."""

    __slots__ = ("_recent", "done", "total")

    def __init__(self, done: int, total: int, now: float) -> None:
        self.done, self.total = done, total
        self._recent = deque([(now, done)], maxlen=RECENT)

    def advance(self, done: int, total: int, now: float) -> None:
        self.done, self.total = done, total
        self._recent.append((now, done))

    def rate(self, now: float) -> float | None:
        """Per second, over the last while; it sinks while nothing comes.  None at first."""
        began, before = self._recent[0]
        if len(self._recent) < 2 or now <= began:
            return None
        return (self.done - before) / (now - began)

    def left_s(self, now: float) -> float | None:
        rate = self.rate(now)
        return max(0.0, (self.total - self.done) / rate) if rate else None

    def to_plain(self, now: float) -> dict[str, Any]:
        rate, left_s = self.rate(now), self.left_s(now)
        return {
            "done": self.done,
            "total": self.total,
            "rate": None if rate is None else round(rate, 3),
            "left_s": None if left_s is None else round(left_s, 1),
        }


class UnderWay:
    """What takes a while at this moment: the worker's job, and weights that are coming."""

    def __init__(self) -> None:
        self._job: str | None = None
        self._work: Pace | None = None
        self._transfers: dict[PeerName, Pace] = {}

    def worked(self, job: str, done: int, total: int) -> None:
        if self._work is None or job != self._job or done < self._work.done:
            self._job, self._work = job, Pace(done, total, time.monotonic())
        else:
            self._work.advance(done, total, time.monotonic())

    def rest(self) -> None:
        """The job is over."""
        self._job = self._work = None

    def arriving(self, peer: PeerName, done: int, total: int) -> None:
        pace = self._transfers.get(peer)
        if pace is None or done < pace.done or total != pace.total:
            self._transfers[peer] = Pace(done, total, time.monotonic())
        else:
            pace.advance(done, total, time.monotonic())

    def arrived(self, peer: PeerName) -> None:
        """Or given up."""
        self._transfers.pop(peer, None)

    def to_plain(self) -> dict[str, Any]:
        """Work counts what the job counts, batches or peers; transfers count bytes of weights."""
        now = time.monotonic()
        return {
            "work": {"job": self._job, **self._work.to_plain(now)} if self._work else None,
            "transfers": [
                {"peer": peer, **pace.to_plain(now)} for peer, pace in self._transfers.items()
            ],
        }
