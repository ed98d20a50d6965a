"""Runs a node that records the duration of its steps.

Wraps methods of the node in its process, and runs the command line unchanged.  `stopwatch.jsonl` in
the site's folder has one line for each step, by the monotonic clock, which all processes share.

    python stopwatch.py start --peers peers.yaml
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

NAME = "stopwatch.jsonl"
START: Sequence[str] = (sys.executable, __file__, "start", "--peers", "peers.yaml")


@dataclass(frozen=True, slots=True)
class Lap:
    """One step of one site."""

    what: str
    began: float
    ended: float
    round: int
    barrier_s: float
    """Seconds that this process has spent in the barrier so far."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def laps_of(home: Path) -> list[Lap]:
    return [Lap(**json.loads(line)) for line in (home / NAME).read_text().splitlines()]


class Stopwatch:
    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._barrier_s = 0.0

    def note(self, what: str, began: float, round: int = -1) -> None:
        lap = [what, began, time.monotonic(), round, self._barrier_s]
        fields = ("what", "began", "ended", "round", "barrier_s")
        self._file.write(json.dumps(dict(zip(fields, lap, strict=True))) + "\n")
        self._file.flush()  # the process may be killed

    def around(self, owner: type, method: str, name: Callable[..., tuple[str, int]]) -> None:
        """Measure an asynchronous method; `name` returns the step and its round."""
        step = getattr(owner, method)

        @functools.wraps(step)
        async def measured(*arguments: Any, **named: Any) -> Any:
            began = time.monotonic()
            try:
                return await step(*arguments, **named)
            finally:
                what, round = name(*arguments)
                self.note(what, began, round)

        setattr(owner, method, measured)

    def watch_journal(self) -> None:
        from lightyear_node.storage.journal import Journal

        append = Journal.append

        @functools.wraps(append)
        def measured(journal: Journal, kind: str, *others: Any, **named: Any) -> Any:
            began = time.monotonic()
            record = append(journal, kind, *others, **named)
            self.note(f"journal {kind}", began, named["round"])
            return record

        Journal.append = measured  # type: ignore[method-assign]

    def watch_barrier(self) -> None:
        from lightyear_node.protocol.parameters import Phase
        from lightyear_node.protocol.state_machine import Barrier

        handle = Barrier.handle

        @functools.wraps(handle)
        def measured(barrier: Barrier, *arguments: Any) -> Any:
            observing = barrier.phase is Phase.OBSERVING
            began = time.monotonic()
            commands = handle(barrier, *arguments)
            self._barrier_s += time.monotonic() - began
            if observing and barrier.phase is not Phase.OBSERVING:
                self.note(f"back {barrier.phase}", began, barrier.round)
            return commands

        Barrier.handle = measured  # type: ignore[method-assign]


def _fetching(_: object, manifest: Any, *others: object) -> tuple[str, int]:
    return f"fetch {manifest.update.peer}", manifest.update.round


def main() -> None:
    began = time.monotonic()
    sys.path.pop(0)  # do not import from the folder of this file
    from lightyear_node.node.worker_jobs import WorkerJobs
    from lightyear_node.transport.client import PeerClient

    with (Path.cwd() / NAME).open("a", encoding="utf-8") as file:
        watch = Stopwatch(file)
        watch.note("begin", began)
        watch.around(WorkerJobs, "open", lambda _: ("open", -1))
        for job in ("train", "judge", "merge"):
            watch.around(WorkerJobs, job, lambda _, round, *others, job=job: (job, round))
        watch.around(PeerClient, "fetch", _fetching)
        watch.watch_journal()
        watch.watch_barrier()
        from lightyear_node.cli import main as run

        run()


if __name__ == "__main__":
    main()
