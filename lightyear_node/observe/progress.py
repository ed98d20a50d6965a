"""Progress, rate and remaining time of jobs and transfers, and their texts for people.

Time is an argument of `JobProgress`; only `CurrentJobs` reads the clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightyear_node.storage.disk_space import size_text
from lightyear_node.types import PeerName

if TYPE_CHECKING:
    from rich.console import Console

RECENT = 32
"""Number of the newest reports from which a rate is computed: network and load change."""
REFUSES_US = "refuses us"
"""Prefix of the reason that a peer has given for refusing our calls."""


class JobProgress:
    """One job or transfer, from its first report on."""

    __slots__ = ("_recent", "done", "total")

    def __init__(self, done: int, total: int, now: float) -> None:
        self.done, self.total = done, total
        self._recent = deque([(now, done)], maxlen=RECENT)

    def advance(self, done: int, total: int, now: float) -> None:
        self.done, self.total = done, total
        self._recent.append((now, done))

    def rate(self, now: float) -> float | None:
        """Units per second over the recent reports; falls while none arrive.  None at first."""
        first_at, first_done = self._recent[0]
        if len(self._recent) < 2 or now <= first_at:
            return None
        return (self.done - first_done) / (now - first_at)

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


class CurrentJobs:
    """The worker's running job and the downloads in progress."""

    def __init__(self) -> None:
        self._job: str | None = None
        self._work: JobProgress | None = None
        self._transfers: dict[PeerName, JobProgress] = {}

    def worked(self, job: str, done: int, total: int) -> None:
        if self._work is None or job != self._job or done < self._work.done:
            self._job, self._work = job, JobProgress(done, total, time.monotonic())
        else:
            self._work.advance(done, total, time.monotonic())

    def end_job(self) -> None:
        self._job = self._work = None

    def arriving(self, peer: PeerName, done: int, total: int) -> None:
        progress = self._transfers.get(peer)
        if progress is None or done < progress.done or total != progress.total:
            self._transfers[peer] = JobProgress(done, total, time.monotonic())
        else:
            progress.advance(done, total, time.monotonic())

    def arrived(self, peer: PeerName) -> None:
        """Remove the download of `peer`, whether it is complete or has failed."""
        self._transfers.pop(peer, None)

    def to_plain(self) -> dict[str, Any]:
        """Return both; `work` counts the job's units (batches or peers), `transfers` bytes."""
        now = time.monotonic()
        return {
            "work": {"job": self._job, **self._work.to_plain(now)} if self._work else None,
            "transfers": [
                {"peer": peer, **progress.to_plain(now)}
                for peer, progress in self._transfers.items()
            ],
        }


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def rate_text(per_second: float) -> str:
    """Format a rate per second, or per minute or hour if it is low."""
    for unit_s, unit in ((1, "s"), (60, "min"), (3600, "h")):
        if per_second * unit_s >= 1 or unit == "h":
            break
    value = per_second * unit_s
    return f"{value:.0f}/{unit}" if value >= 10 else f"{value:.1f}/{unit}"


def progress_text(progress: Mapping[str, Any], *, weights: bool = False) -> str:
    """Format the `to_plain` of a `JobProgress`; `weights` counts bytes."""
    count = size_text if weights else str
    text = f"{count(progress['done'])} of {count(progress['total'])}"
    if rate := progress["rate"]:
        text += f", {size_text(round(rate))}/s" if weights else f", {rate_text(rate)}"
    if progress["left_s"] is not None:
        text += f", about {duration(progress['left_s'])} left"
    return text


def peer_state_text(state: str, about: str) -> str:
    """Format a peer's state and its cause; the cause alone if it begins with `REFUSES_US`."""
    if state == "refused" and about.startswith(REFUSES_US):
        return about
    return f"{state}: {about}" if about else state


def can_redraw(console: Console) -> bool:
    """Whether output can be redrawn in place; a dumb terminal cannot move its cursor."""
    return console.is_terminal and not console.is_dumb_terminal
