"""Writes completed rounds for other tools: CSV, JSON, and TensorBoard or MLflow if configured.

All output is derived from the journal and can be rebuilt from it.  One thread writes one round at a
time.  A failure is logged once, retried with the next round, and never affects the rounds.

Modules:

    csv_files           `rounds.jsonl`, `rounds.csv` and `verdicts.csv`
    flat_rows           a round as named numbers, for every writer
    tensorboard_events  TensorBoard event files
    mlflow_run          one MLflow run per journal
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from lightyear_node.errors import StoreError
from lightyear_node.storage.history import Entry, History
from lightyear_node.storage.journal_reader import reading

QUEUE_MAX = 64
CLOSE_S = 5.0
"""Time limit for pending writes: a server that does not answer must not delay the shutdown."""


class Writer(Protocol):
    name: str

    def resume(self, recent: Sequence[Entry]) -> bool:
        """Whether the output ends with these rounds, so that rounds can be added to it."""

    def rebuild(self, rounds: Sequence[Entry]) -> None:
        """Make the output equal to these rounds, whatever it contains."""

    def add(self, entry: Entry) -> None:
        """Add one round; raises `OutOfStep` if the output was changed by others."""

    def close(self) -> None: ...


class OutOfStep(Exception):
    """The output must be rebuilt from all rounds."""


class Tracking:
    """`report` receives texts for the log, in the writing thread, and whether each is a failure."""

    def __init__(
        self,
        journal: Path,
        writers: Sequence[Writer],
        report: Callable[[str, bool], None],
        recent: Sequence[Entry] = (),
    ) -> None:
        """`recent` rounds are used to resume without reading the whole journal."""
        self._journal = journal
        self._writers = list(writers)
        self._report = report
        self._stale = {writer.name for writer in writers}
        """Names of the writers that must rebuild."""
        self._recent = recent
        self._failing: set[str] = set()
        self._completed: queue.Queue[Entry | None] = queue.Queue(QUEUE_MAX)
        self._missed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()

    def follow(self, entry: Entry) -> None:
        """Queue a completed round; returns at once."""
        try:
            self._completed.put_nowait(entry)
        except queue.Full:
            self._missed.set()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write the queued rounds, within a time limit."""
        try:
            self._completed.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _work(self) -> None:
        self._resume()
        self._write(None)
        while (entry := self._completed.get()) is not None:
            if self._missed.is_set():
                self._missed.clear()
                self._stale = {writer.name for writer in self._writers}
            self._write(entry)
        for writer in self._writers:
            writer.close()

    def _resume(self) -> None:
        for writer in self._writers if self._recent else ():
            with contextlib.suppress(Exception):  # `rebuild` fails, too, and is reported
                if writer.resume(self._recent):
                    self._stale.discard(writer.name)
        self._recent = ()

    def _write(self, entry: Entry | None) -> None:
        rounds: list[Entry] | None = None
        for writer in self._writers:
            if entry is not None and writer.name not in self._stale:
                try:
                    self._try(writer, partial(writer.add, entry))
                    continue
                except OutOfStep:
                    self._stale.add(writer.name)
            if entry is None and writer.name not in self._stale:
                continue
            if rounds is None:
                rounds = self._recorded()
            if rounds is not None:
                self._try(writer, partial(writer.rebuild, rounds))

    def _recorded(self) -> list[Entry] | None:
        try:
            return recorded_rounds(self._journal)
        except (StoreError, ValueError):
            return None  # the node itself reports a broken journal

    def _try(self, writer: Writer, step: Callable[[], None]) -> None:
        try:
            step()
        except OutOfStep:
            raise
        except Exception as problem:  # third-party packages may raise anything
            self._stale.add(writer.name)
            if writer.name not in self._failing:
                about = _one_line(problem)
                if isinstance(problem, ModuleNotFoundError):
                    about += f" (pip install 'lightyear-node[{writer.name}]')"
                self._report(f"{writer.name} cannot be written, rounds go on: {about}", True)
            self._failing.add(writer.name)
        else:
            self._stale.discard(writer.name)
            if writer.name in self._failing:
                self._failing.discard(writer.name)
                self._report(f"{writer.name} is complete again", False)


def recorded_rounds(journal: Path) -> list[Entry]:
    """Return all completed rounds of a journal; of a repeated round, the last attempt."""
    found: dict[int, Entry] = {}

    def keep(entry: Entry) -> None:
        found.pop(entry["round"], None)
        found[entry["round"]] = entry

    history = History()
    history.followers.append(keep)
    with reading(journal) as copy:
        for row in copy.rows():
            history.add(row.kind, row.round, row.plain_body(), row.wall_ns)
    return list(found.values())


def _one_line(problem: Exception) -> str:
    first = next(iter(str(problem).splitlines()), "")
    return f"{type(problem).__name__}: {first}"[:300]
