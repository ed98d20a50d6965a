"""When the node ends: now, after the round under way, or when every site has finished."""

from __future__ import annotations

import asyncio


class Stopped(Exception):
    """Ends the task group that owns all of the node's tasks."""


class StopRequest:
    def __init__(self, *, when_finished: bool = False) -> None:
        self.when_finished = when_finished
        """Whether to stop once every reachable site has completed all rounds."""
        self.after_round = False
        """Whether to stop with the next completed round."""
        self._requested = asyncio.Event()

    def now(self) -> None:
        self._requested.set()

    def by_operator(self, after_round: bool) -> None:
        self.after_round = after_round
        if not after_round:
            self.now()

    async def wait(self) -> None:
        """Raise `Stopped` when a stop is requested."""
        await self._requested.wait()
        raise Stopped
