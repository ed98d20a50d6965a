"""What a person sees while an experiment runs: how far it is, who works on what, how long yet.

On a terminal one live picture, elsewhere a line for every finished job.  Nothing here runs a job:
whoever does writes it onto the board.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lightyear_node.lab.jobs import AcceptanceJob, Job
from lightyear_node.observe.words import drawable, duration, rate_text

AnyJob = Job | AcceptanceJob


@dataclass(slots=True)
class Lane:
    """One child at a time."""

    job: AnyJob | None = None
    since: float = 0.0
    share: float = 0.0


@dataclass(slots=True)
class Costs:
    """Seconds per step of what has been measured, by family."""

    _by_family: dict[tuple[str, ...], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, job: Job, seconds: float) -> None:
        for family in _families(job):
            self._by_family[family].append(seconds / job.steps)

    def expected_s(self, job: AnyJob) -> float | None:
        """From the nearest relatives that there are: same rule, same task, any."""
        if isinstance(job, AcceptanceJob):
            return None
        known = (self._by_family.get(family) for family in _families(job))
        return next((fmean(costs) * job.steps for costs in known if costs), None)


def _families(job: Job) -> tuple[tuple[str, ...], ...]:
    return job.family, job.family[:2], ()


@dataclass(slots=True)
class Board:
    """How things stand; written by the runner, read by the view."""

    suite: str
    total: int
    lanes: Sequence[Lane]
    done: int = 0
    failed: int = 0
    before: int = 0
    """Of those done, how many were there when this run began."""
    pending: Sequence[AnyJob] = ()
    costs: Costs = field(default_factory=Costs)
    began: float = field(default_factory=time.monotonic)

    def rest_s(self) -> float | None:
        """None while nothing like the rest has been measured."""
        waiting = [self.costs.expected_s(job) for job in self.pending]
        running = [
            (1 - lane.share) * (self.costs.expected_s(lane.job) or 0)
            for lane in self.lanes
            if lane.job is not None
        ]
        known = [seconds for seconds in waiting if seconds is not None]
        if not known and not any(running):
            return None
        return (sum(known) + sum(running)) / min(len(self.lanes), len(waiting) + len(running))


Finished = Callable[[AnyJob, str], None]


@contextmanager
def showing(console: Console, board: Board, *, shown: bool = True) -> Iterator[Finished]:
    """Gives a function to be called with every finished job and its outcome in words."""
    if not shown:
        yield lambda job, outcome: None
    elif not drawable(console):

        def say(job: AnyJob, outcome: str) -> None:
            elapsed_s = time.monotonic() - board.began
            words = (
                f"{elapsed_s:6.1f} s  {_count(board)}  {job.in_words()}: {outcome}"
                f"{_rate(board, time.monotonic())}{_rest(board)}"
            )
            console.print(words, highlight=False, markup=False, soft_wrap=True)

        yield say
    else:
        draw = lambda: picture(board, time.monotonic())  # noqa: E731 - drawn anew at every refresh
        with Live(get_renderable=draw, console=console, refresh_per_second=4):
            yield lambda job, outcome: None


def picture(board: Board, now: float) -> RenderableType:
    header = Text.assemble(
        (f" {board.suite} ", "bold reverse"),
        f"  {_count(board)}",
        (f"  {board.failed} failed" if board.failed else "", "bold red"),
        (f"  {duration(now - board.began)}{_rate(board, now)}{_rest(board)}", "dim"),
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    table.add_column("lane", justify="right", no_wrap=True)
    table.add_column("job", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("part", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    for number, lane in enumerate(board.lanes, start=1):
        if lane.job is None:
            table.add_row(str(number), Text("nothing left to do", "dim"), "", "")
            continue
        share = f"{100 * lane.share:.0f} %" if lane.share else "loading"
        elapsed = duration(now - lane.since)
        table.add_row(str(number), Text(lane.job.in_words()), share, elapsed)
    bar = ProgressBar(total=max(board.total, 1), completed=board.done + board.failed)
    return Group(header, bar, table)


def _count(board: Board) -> str:
    return f"{board.done + board.failed} of {board.total}"


def _rate(board: Board, now: float) -> str:
    """Of this run's own jobs."""
    done = board.done + board.failed - board.before
    return f", {rate_text(done / (now - board.began))}" if done and now > board.began else ""


def _rest(board: Board) -> str:
    rest_s = board.rest_s()
    return "" if rest_s is None else f", about {duration(rest_s)} left"
