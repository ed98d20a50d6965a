"""The worker's end of the pipe to the daemon: jobs in, progress and answers out, one line each.

Standard output carries the answers only; whatever the task prints goes to standard error.  When the
daemon ends, which closes our standard input, the worker exits at once, even during training: a
worker without a daemon must not occupy a GPU.  A process that the user's code forks gets neither
end: it would keep the pipe open after the worker has ended.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import sys
import threading
import time
import traceback
from typing import Any

from lightyear_node.errors import ConfigError, LightyearError
from lightyear_node.worker.error_redaction import hides_text, redacted
from lightyear_node.worker.job_types import (
    ERROR_CONFIG,
    ERROR_DISK,
    ERROR_FILES,
    ERROR_FULL,
    ERROR_TASK,
    PROGRESS_INTERVAL_S,
)
from lightyear_node.worker.memory_limit import describe_limit, ran_out

DISK_ERRORS = {
    errno.ENOSPC: ERROR_FULL,
    errno.EDQUOT: ERROR_FULL,
    # The whole machine's limit; EMFILE is this process's own, which a new worker starts afresh.
    errno.ENFILE: ERROR_FILES,
    errno.EROFS: ERROR_DISK,
    errno.EIO: ERROR_DISK,
}

DISK_HINT = "check the disk of the state directory, and those that the task writes to"
MEMORY_HINT = "raise `worker.memory_max`, or let the task use less memory: smaller batches"
HIDDEN_HINT = (
    "its text is not shown, for it may name training data: `log: {task_errors: full}` in node.yaml"
    " shows it in the log, `lightyear-node check` on the screen"
)
JOBS_QUEUED_MAX = 4
READ_BYTES = 1 << 16

Answer = dict[str, Any]


class JobPipe:
    """Takes over standard input and output of this process."""

    def __init__(self, *, full_errors: bool, memory_max: int | None) -> None:
        self._full_errors = full_errors
        self._memory_max = memory_max
        self._null = os.open(os.devnull, os.O_RDWR)
        self._requests, self._answers = os.dup(0), os.dup(1)
        os.dup2(self._null, 0)
        os.dup2(2, 1)
        # So that the log shows each line of the task's output when it is printed.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        self._queue: queue.Queue[bytes] = queue.Queue(maxsize=JOBS_QUEUED_MAX)
        threading.Thread(target=self._read, daemon=True).start()
        os.register_at_fork(after_in_child=self._leave)

    def next(self) -> WorkerJob:
        """Wait for the next job."""
        return WorkerJob(self, json.loads(self._queue.get()))

    def write(self, answer: Answer) -> None:
        line = memoryview(json.dumps(answer).encode() + b"\n")
        while line:
            line = line[os.write(self._answers, line) :]

    def error(self, problem: BaseException) -> Answer:
        """What the daemon is to know about an exception."""
        message = redacted(problem, full=self._full_errors)
        if isinstance(problem, LightyearError):
            kind = ERROR_CONFIG if isinstance(problem, ConfigError) else ERROR_TASK
            hidden = hides_text(problem) and not self._full_errors
            hint = problem.hint or (HIDDEN_HINT if hidden else None)
            return {"error": kind, "message": message, "hint": hint}
        if isinstance(problem, OSError) and problem.errno in DISK_ERRORS:
            return {"error": DISK_ERRORS[problem.errno], "message": message, "hint": DISK_HINT}
        if self._memory_max is not None and ran_out(problem):
            message = f"no memory left: {message}; {describe_limit(self._memory_max)}"
            return {"error": ERROR_TASK, "message": message, "hint": MEMORY_HINT}
        if self._full_errors:
            traceback.print_exception(problem)
        hint = None if self._full_errors else HIDDEN_HINT
        return {"error": ERROR_TASK, "message": message, "hint": hint}

    def _read(self) -> None:
        rest = b""
        while content := os.read(self._requests, READ_BYTES):
            *lines, rest = (rest + content).split(b"\n")
            for line in lines:
                self._queue.put(line)
        os._exit(0)

    def _leave(self) -> None:
        """In a forked process: let go of the pipe, keeping the descriptors' numbers."""
        os.dup2(self._null, self._requests)
        os.dup2(self._null, self._answers)


class WorkerJob:
    """One job, which is answered once."""

    def __init__(self, pipe: JobPipe, request: dict[str, Any]) -> None:
        self._pipe = pipe
        self._number = request.pop("id")
        self.name: str = request.pop("job")
        self.arguments = request
        self.answered = False
        """Set before the answer is written: the daemon may react at once."""
        self._last_sent = 0.0

    def progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last_sent >= PROGRESS_INTERVAL_S or done == total:
            self._last_sent = now
            self._pipe.write({"id": self._number, "progress": [done, total]})

    def succeed(self, answer: Answer) -> None:
        self.answered = True
        self._pipe.write({"id": self._number, "ok": answer})

    def fail(self, problem: BaseException) -> None:
        error = self._pipe.error(problem)
        self.answered = True
        self._pipe.write({"id": self._number, **error})
