"""SIGTERM while a training script waits: its loop ends, so that its last lines run.

Only between rounds.  During training, or while a job runs, SIGTERM ends the process as usual.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from lightyear_node.worker.pipe import WorkerJob


class StopWaiting(BaseException):
    """SIGTERM arrived."""


class StopSignal:
    def __init__(self) -> None:
        self.received = False
        self._watching = False
        self._waiting = False
        self._serving: WorkerJob | None = None
        self._before: Any = signal.SIG_DFL

    def watch(self) -> None:
        """Handle the signal until `release`."""
        if not self._watching:
            self._watching = True
            self._before = signal.signal(signal.SIGTERM, self._handle)

    def release(self) -> None:
        """Leave the signal to the handler from before."""
        if self._watching:
            signal.signal(signal.SIGTERM, self._before)
            self._watching = False

    def wait(self, next_job: Callable[[], WorkerJob]) -> WorkerJob | None:
        """The next job; None if the signal has arrived."""
        try:
            self._waiting = True
            job = None if self.received else next_job()
            self._waiting = False
        except StopWaiting:
            return None
        return job

    def serve(self, job: WorkerJob, answer: Callable[[WorkerJob], None]) -> None:
        self._serving = job
        answer(job)
        self._serving = None

    def _handle(self, *_: object) -> None:
        if self._serving is not None and not self._serving.answered:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self.received = True
        if self._waiting:
            self._waiting = False
            raise StopWaiting
