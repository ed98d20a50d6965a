"""Shows the progress of an experiment: finished jobs, running jobs, time left.

On a terminal a live view, elsewhere a line for every finished job.  Runs no job: the runner updates
`RunProgress`.
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
from lightyear_node.observe.progress import can_redraw, duration, rate_text

AnyJob = Job | AcceptanceJob


@dataclass(slots=True)
class ChildSlot:
    """Runs one child process at a time."""

    job: AnyJob | None = None
    since: float = 0.0
    share: float = 0.0


@dataclass(slots=True)
class StepCosts:
    """Measured seconds per step, by family of jobs."""

    _by_family: dict[tuple[str, ...], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, job: Job, seconds: float) -> None:
        for family in _families(job):
            self._by_family[family].append(seconds / job.steps)

    def expected_s(self, job: AnyJob) -> float | None:
        """Estimate from the most similar finished jobs: same rule, same task, any."""
        if isinstance(job, AcceptanceJob):
            return None
        known = (self._by_family.get(family) for family in _families(job))
        return next((fmean(costs) * job.steps for costs in known if costs), None)


def _families(job: Job) -> tuple[tuple[str, ...], ...]:
    return job.family, job.family[:2], ()


@dataclass(slots=True)
class RunProgress:
    """The state of a run; written by the runner, read by the view."""

    suite: str
    total: int
    slots: Sequence[ChildSlot]
    done: int = 0
    failed: int = 0
    before: int = 0
    """How many were done before this run."""
    pending: Sequence[AnyJob] = ()
    costs: StepCosts = field(default_factory=StepCosts)
    began: float = field(default_factory=time.monotonic)

    def left_s(self) -> float | None:
        """Estimated seconds left; None while nothing similar has been measured."""
        waiting = [self.costs.expected_s(job) for job in self.pending]
        running = [
            (1 - slot.share) * (self.costs.expected_s(slot.job) or 0)
            for slot in self.slots
            if slot.job is not None
        ]
        known = [seconds for seconds in waiting if seconds is not None]
        if not known and not any(running):
            return None
        return (sum(known) + sum(running)) / min(len(self.slots), len(waiting) + len(running))


Finished = Callable[[AnyJob, str], None]


@contextmanager
def show_progress(
    console: Console, progress: RunProgress, *, shown: bool = True
) -> Iterator[Finished]:
    """Show the progress; yields a function to call with every finished job and its outcome."""
    if not shown:
        yield lambda job, outcome: None
    elif not can_redraw(console):

        def print_line(job: AnyJob, outcome: str) -> None:
            elapsed_s = time.monotonic() - progress.began
            text = (
                f"{elapsed_s:6.1f} s  {_count(progress)}  {job.description()}: {outcome}"
                f"{_rate(progress, time.monotonic())}{_time_left(progress)}"
            )
            console.print(text, highlight=False, markup=False, soft_wrap=True)

        yield print_line
    else:
        draw = lambda: render_progress(progress, time.monotonic())  # noqa: E731 - called at every refresh
        with Live(get_renderable=draw, console=console, refresh_per_second=4):
            yield lambda job, outcome: None


def render_progress(progress: RunProgress, now: float) -> RenderableType:
    header = Text.assemble(
        (f" {progress.suite} ", "bold reverse"),
        f"  {_count(progress)}",
        (f"  {progress.failed} failed" if progress.failed else "", "bold red"),
        (f"  {duration(now - progress.began)}{_rate(progress, now)}{_time_left(progress)}", "dim"),
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    table.add_column("slot", justify="right", no_wrap=True)
    table.add_column("job", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("part", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    for number, slot in enumerate(progress.slots, start=1):
        if slot.job is None:
            table.add_row(str(number), Text("nothing left to do", "dim"), "", "")
            continue
        share = f"{100 * slot.share:.0f} %" if slot.share else "loading"
        elapsed = duration(now - slot.since)
        table.add_row(str(number), Text(slot.job.description()), share, elapsed)
    bar = ProgressBar(total=max(progress.total, 1), completed=progress.done + progress.failed)
    return Group(header, bar, table)


def _count(progress: RunProgress) -> str:
    return f"{progress.done + progress.failed} of {progress.total}"


def _rate(progress: RunProgress, now: float) -> str:
    """Jobs of this run per second."""
    done = progress.done + progress.failed - progress.before
    return f", {rate_text(done / (now - progress.began))}" if done and now > progress.began else ""


def _time_left(progress: RunProgress) -> str:
    left_s = progress.left_s()
    return "" if left_s is None else f", about {duration(left_s)} left"
