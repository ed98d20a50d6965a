"""The completed rounds for people's own tools: files always, TensorBoard and MLflow where wanted.

Everything here is made from the journal and can be made from it again.  It works in a thread of its
own, one round at a time; what fails is told once, tried again with the next round, and never
disturbs the rounds themselves.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from lightyear_node.errors import StoreError
from lightyear_node.history import Entry, History
from lightyear_node.journal import reading

WAITING_MAX = 64
CLOSE_S = 5.0
"""A server that does not answer must not keep the node from ending."""


class Writer(Protocol):
    name: str

    def begin(self, rounds: Sequence[Entry]) -> None:
        """Make what is written equal to these rounds, whatever is there."""
        ...

    def add(self, entry: Entry) -> None:
        """One more round; raises `Astray` if what is written is not what we left."""
        ...

    def close(self) -> None: ...


class Astray(Exception):
    """What is written has to be made anew from all rounds."""


class Tracking:
    """`tell` gets the sentences for the log, from our thread, and whether they are bad news."""

    def __init__(
        self, journal: Path, writers: Sequence[Writer], tell: Callable[[str, bool], None]
    ) -> None:
        self._journal = journal
        self._writers = list(writers)
        self._tell = tell
        self._stale = {writer.name for writer in writers}
        """Who has to begin anew."""
        self._failing: set[str] = set()
        self._completed: queue.Queue[Entry | None] = queue.Queue(WAITING_MAX)
        self._missed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()

    def follow(self, entry: Entry) -> None:
        """A round is completed; returns at once."""
        try:
            self._completed.put_nowait(entry)
        except queue.Full:
            self._missed.set()

    def close(self) -> None:
        """What is waiting is still written, unless that takes long."""
        try:
            self._completed.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _work(self) -> None:
        self._bring_up_to_date(None)
        while (entry := self._completed.get()) is not None:
            if self._missed.is_set():
                self._missed.clear()
                self._stale = {writer.name for writer in self._writers}
            self._bring_up_to_date(entry)
        for writer in self._writers:
            writer.close()

    def _bring_up_to_date(self, entry: Entry | None) -> None:
        rounds: list[Entry] | None = None
        for writer in self._writers:
            if entry is not None and writer.name not in self._stale:
                try:
                    self._try(writer, partial(writer.add, entry))
                    continue
                except Astray:
                    self._stale.add(writer.name)
            if rounds is None:
                rounds = self._recorded()
            if rounds is not None:
                self._try(writer, partial(writer.begin, rounds))

    def _recorded(self) -> list[Entry] | None:
        try:
            return recorded_rounds(self._journal)
        except (StoreError, ValueError):
            return None  # the node itself will have more to say about its journal

    def _try(self, writer: Writer, step: Callable[[], None]) -> None:
        try:
            step()
        except Astray:
            raise
        except Exception as problem:  # other people's packages: anything can come out of them
            self._stale.add(writer.name)
            if writer.name not in self._failing:
                about = _one_line(problem)
                if isinstance(problem, ModuleNotFoundError):
                    about += f" (pip install 'lightyear-node[{writer.name}]')"
                self._tell(f"{writer.name} cannot be written, rounds go on: {about}", True)
            self._failing.add(writer.name)
        else:
            self._stale.discard(writer.name)
            if writer.name in self._failing:
                self._failing.discard(writer.name)
                self._tell(f"{writer.name} is complete again", False)


def recorded_rounds(journal: Path) -> list[Entry]:
    """All completed rounds of a journal; of one that was done twice, the second time."""
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
