"""A node that kills itself at a failpoint, such as `FAILPOINT=before:seal:2`.

Used instead of `lightyear-node`: the product has no failpoints.  This program wraps, in its own
process, the methods that make a step durable: every journal record by its kind (`start` is
persistence point 0, `seal` 1, `decision` 2, `commit` 3; also `settings` and all other kinds), every
file that enters a store (`adopt-updates`, `adopt-models`, `adopt-carry`) and every `fetch` of a
peer's update.  Then it runs the unchanged command line.  Without the variable nothing is wrapped.

The process dies `before` or `after` the n-th time (default: the first) that it reaches the point.
`after` a record means that it is durable and no action has followed.

If the site's home contains a file `train-until`, the node trains no round after the number in it
and waits until the file changes or disappears.  So a test controls which site is in which round.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

VARIABLE = "FAILPOINT"
"""Has another prefix than the node's own variables, which are refused when unknown."""
GATE = "train-until"
GATE_POLL_S = 0.05
FETCH = "fetch"
ADOPT = "adopt-"
START: Sequence[str] = (sys.executable, __file__, "start", "--peers", "peers.yaml")
"""The command that starts a site with failpoints available."""


@dataclass(frozen=True, slots=True)
class Failpoint:
    when: str
    point: str
    nth: int = 1

    @classmethod
    def parse(cls, text: str) -> Failpoint:
        when, point, *nth = text.split(":")
        if when not in ("before", "after") or not point or len(nth) > 1:
            raise ValueError(f"{text!r} is not before:POINT, after:POINT or either with :N")
        return cls(when, point, int(nth[0]) if nth else 1)


class Trigger:
    """Counts how often each point is reached and acts at the chosen one."""

    def __init__(self, chosen: Failpoint, act: Callable[[Failpoint], None]) -> None:
        self._chosen = chosen
        self._act = act
        self._times: Counter[str] = Counter()

    def reach(self, point: str) -> int:
        """Count an arrival before the step; the number belongs to `leave`, as fetches overlap."""
        self._times[point] += 1
        self._act_at("before", point, self._times[point])
        return self._times[point]

    def leave(self, point: str, nth: int) -> None:
        self._act_at("after", point, nth)

    def around(self, name: Callable[..., str], step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method; `name` derives the point from its arguments."""

        @functools.wraps(step)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            point = name(*arguments, **named)
            nth = self.reach(point)
            done = step(*arguments, **named)
            self.leave(point, nth)
            return done

        return wrapped

    def around_async(
        self, point: str, step: Callable[..., Awaitable[Any]]
    ) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(step)
        async def wrapped(*arguments: Any, **named: Any) -> Any:
            nth = self.reach(point)
            done = await step(*arguments, **named)
            self.leave(point, nth)
            return done

        return wrapped

    def _act_at(self, when: str, point: str, nth: int) -> None:
        here = Failpoint(when, point, nth)
        if here == self._chosen:
            self._act(here)


def install(trigger: Trigger) -> None:
    """Wrap the methods of the product's classes, in this process only."""
    from lightyear_node.storage.blobs import BlobStore
    from lightyear_node.storage.journal import Journal
    from lightyear_node.transport.client import PeerClient

    def kind_of(journal: object, kind: str, *_: object, **__: object) -> str:
        return kind

    def store_of(store: object, scratch: Path) -> str:
        return ADOPT + scratch.parent.name

    for owner, method, wrapped in (
        (Journal, "append", trigger.around(kind_of, Journal.append)),
        (BlobStore, "adopt", trigger.around(store_of, BlobStore.adopt)),
        (PeerClient, "fetch", trigger.around_async(FETCH, PeerClient.fetch)),
    ):
        setattr(owner, method, wrapped)


def limit_training(gate: Path) -> None:
    from lightyear_node.node.worker_jobs import WorkerJobs

    train = WorkerJobs.train

    def wait_for(round: int) -> None:
        while gate.exists() and round > int(gate.read_text()):
            time.sleep(GATE_POLL_S)

    @functools.wraps(train)
    async def when_allowed(worker_jobs: WorkerJobs, round: Any, *others: Any, **named: Any) -> Any:
        await asyncio.to_thread(wait_for, round)
        return await train(worker_jobs, round, *others, **named)

    setattr(WorkerJobs, "train", when_allowed)  # noqa: B010


def die(here: Failpoint) -> NoReturn:
    os.write(2, f"dies {here.when} {here.point} {here.nth}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)
    # SIGKILL may end the other threads a moment before this one.
    while True:
        signal.pause()


def main() -> None:
    # Nothing else is to be imported from the folder of this file.
    sys.path.pop(0)
    chosen = os.environ.pop(VARIABLE, None)
    if chosen is not None:
        install(Trigger(Failpoint.parse(chosen), die))
    limit_training(Path.cwd() / GATE)
    from lightyear_node.cli import main as run

    run()


if __name__ == "__main__":
    main()
