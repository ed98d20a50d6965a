"""A node that kills itself at one exact moment, such as that of `FAILPOINT=before:seal:2`.

Used instead of `lightyear-node`: the product has no such points.  This program wraps, in its own
process, what makes a step durable: every record of the journal by its kind (`start` is persistence
point 0, `seal` 1, `decision` 2, `commit` 3; also `settings` and whatever else is recorded), every
file that enters a store (`adopt-updates`, `adopt-models`, `adopt-carry`) and every `fetch` of a
peer's update.  Then it runs the command line as it is; without the variable that is all.

The moment is `before` or `after` the n-th time (the first, if not given) that this process gets
there.  `after` a record means that it is durable and that nobody has acted on it.

Where the file `train-until` is in the site's home, it trains no later round than that says, but
waits until it is told otherwise: so a test decides who may be in which round.
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
"""Not one of the node's own settings, which begin otherwise and are refused when unknown."""
GATE = "train-until"
GATE_POLL_S = 0.05
FETCH = "fetch"
ADOPT = "adopt-"
START: Sequence[str] = (sys.executable, __file__, "start", "--peers", "peers.yaml")
"""How a federation starts its sites so that each of them could be told to die."""


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


class Fuse:
    """Counts how often each point is reached, and burns at the chosen one."""

    def __init__(self, chosen: Failpoint, burn: Callable[[Failpoint], None]) -> None:
        self._chosen = chosen
        self._burn = burn
        self._times: Counter[str] = Counter()

    def reach(self, point: str) -> int:
        """Called before; its answer is for `pass_by`, since several fetches run side by side."""
        self._times[point] += 1
        self._burn_at("before", point, self._times[point])
        return self._times[point]

    def pass_by(self, point: str, nth: int) -> None:
        self._burn_at("after", point, nth)

    def around(self, name: Callable[..., str], step: Callable[..., Any]) -> Callable[..., Any]:
        """The same method, watched; `name` tells from its arguments which point it is."""

        @functools.wraps(step)
        def watched(*arguments: Any, **named: Any) -> Any:
            point = name(*arguments, **named)
            nth = self.reach(point)
            done = step(*arguments, **named)
            self.pass_by(point, nth)
            return done

        return watched

    def around_waiting(
        self, point: str, step: Callable[..., Awaitable[Any]]
    ) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(step)
        async def watched(*arguments: Any, **named: Any) -> Any:
            nth = self.reach(point)
            done = await step(*arguments, **named)
            self.pass_by(point, nth)
            return done

        return watched

    def _burn_at(self, when: str, point: str, nth: int) -> None:
        here = Failpoint(when, point, nth)
        if here == self._chosen:
            self._burn(here)


def arm(fuse: Fuse) -> None:
    """Put the fuse around the classes' own methods, in this process only."""
    from lightyear_node.journal import Journal
    from lightyear_node.store import Store
    from lightyear_node.transport.client import PeerClient

    def kind_of(journal: object, kind: str, *_: object, **__: object) -> str:
        return kind

    def store_of(store: object, scratch: Path) -> str:
        return ADOPT + scratch.parent.name

    for owner, method, watched in (
        (Journal, "append", fuse.around(kind_of, Journal.append)),
        (Store, "adopt", fuse.around(store_of, Store.adopt)),
        (PeerClient, "fetch", fuse.around_waiting(FETCH, PeerClient.fetch)),
    ):
        setattr(owner, method, watched)


def hold_training(gate: Path) -> None:
    from lightyear_node.learner import Learner

    train = Learner.train

    def wait_for(round: int) -> None:
        while gate.exists() and round > int(gate.read_text()):
            time.sleep(GATE_POLL_S)

    @functools.wraps(train)
    async def when_allowed(learner: Learner, round: Any, *others: Any, **named: Any) -> Any:
        await asyncio.to_thread(wait_for, round)
        return await train(learner, round, *others, **named)

    setattr(Learner, "train", when_allowed)  # noqa: B010


def die(here: Failpoint) -> NoReturn:
    os.write(2, f"dies {here.when} {here.point} {here.nth}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)
    # The other threads' end may come a moment earlier than ours.
    while True:
        signal.pause()


def main() -> None:
    # The folder of this file is no place to import anything else from.
    sys.path.pop(0)
    chosen = os.environ.pop(VARIABLE, None)
    if chosen is not None:
        arm(Fuse(Failpoint.parse(chosen), die))
    hold_training(Path.cwd() / GATE)
    from lightyear_node.cli import main as run

    run()


if __name__ == "__main__":
    main()
