"""How far something is whose length is known, with its rate and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lightyear_node.observe.pace import Pace
from lightyear_node.observe.words import drawable, progress_words

LINE_INTERVAL_S = 5.0
"""Between two lines that only say how far something is."""

Count = Callable[[int, int], None]


@contextmanager
def counting(console: Console, label: str, *, shown: bool = True) -> Iterator[Count]:
    """A bar on a terminal, a line now and then elsewhere; gives a function (done, total)."""
    if not shown:
        yield lambda done, total: None
    elif not drawable(console):
        console.print(f"{label} …", highlight=False)
        yield _Counted(console).update
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task(label, total=None, words="")
            pace = Pace(0, 0, time.monotonic())

            def update(done: int, total: int) -> None:
                now = time.monotonic()
                pace.advance(done, total, now)
                words = progress_words(pace.to_plain(now))
                progress.update(bar, completed=done, total=total, words=words)

            yield update


class _Counted:
    """For a log file or a pipe: a line after each tenth, but not one after the other."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pace = Pace(0, 0, time.monotonic())
        self._told_share, self._told_at = 0, time.monotonic()

    def update(self, done: int, total: int) -> None:
        now = time.monotonic()
        self._pace.advance(done, total, now)
        share = 10 * done // max(total, 1)
        if share > self._told_share and now - self._told_at >= LINE_INTERVAL_S:
            self._told_share, self._told_at = share, now
            words = progress_words(self._pace.to_plain(now))
            self._console.print(words, highlight=False, soft_wrap=True)
