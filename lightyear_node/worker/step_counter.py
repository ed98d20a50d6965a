"""Counts the optimizer steps of a training script, which reports no progress by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from lightyear_node.worker.job_types import PROGRESS_INTERVAL_S


class StepCounter:
    def __init__(self) -> None:
        self._report: Callable[[int, int], None] = lambda done, total: None
        self._hook: RemovableHandle | None = None
        self._done = self._expected = 0
        self._last = 0.0
        self._by_script = False

    def start(self, report: Callable[[int, int], None], expected: int) -> None:
        """Count from 0; `expected` is the number of steps of the round before, 0 if unknown."""
        self.stop()
        self._report, self._expected = report, expected
        self._done, self._last, self._by_script = 0, 0.0, False
        self._hook = register_optimizer_step_post_hook(self._stepped)

    def stop(self) -> int:
        """Stop counting; returns the number of steps."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        return self._done

    def report(self, done: int, total: int) -> None:
        """Report what the script itself counts; steps are then no longer reported."""
        self._by_script = True
        self._send(done, total)

    def _stepped(self, *_: Any) -> None:
        self._done += 1
        if not self._by_script:
            self._send(self._done, max(self._expected, self._done))

    def _send(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last >= PROGRESS_INTERVAL_S:
            self._last = now
            self._report(done, total)
