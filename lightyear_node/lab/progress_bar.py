"""A progress bar for work of known length, with its rate and the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lightyear_node.observe.progress import JobProgress, can_redraw, progress_text

LINE_INTERVAL_S = 5.0
"""Minimum time between two lines of progress."""

Count = Callable[[int, int], None]


@contextmanager
def progress_bar_shown(console: Console, label: str, *, shown: bool = True) -> Iterator[Count]:
    """A bar on a terminal, occasional lines elsewhere; yields a function (done, total)."""
    if not shown:
        yield lambda done, total: None
    elif not can_redraw(console):
        console.print(f"{label} …", highlight=False)
        yield _ProgressLines(console).update
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task(label, total=None, words="")
            job = JobProgress(0, 0, time.monotonic())

            def update(done: int, total: int) -> None:
                now = time.monotonic()
                job.advance(done, total, now)
                words = progress_text(job.to_plain(now))
                progress.update(bar, completed=done, total=total, words=words)

            yield update


class _ProgressLines:
    """For a log file or a pipe: at most one line per tenth and per interval."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._job = JobProgress(0, 0, time.monotonic())
        self._printed_share, self._printed_at = 0, time.monotonic()

    def update(self, done: int, total: int) -> None:
        now = time.monotonic()
        self._job.advance(done, total, now)
        share = 10 * done // max(total, 1)
        if share > self._printed_share and now - self._printed_at >= LINE_INTERVAL_S:
            self._printed_share, self._printed_at = share, now
            words = progress_text(self._job.to_plain(now))
            self._console.print(words, highlight=False, soft_wrap=True)
