"""The worker process: reads one job per line, answers one line, and holds no opinion of its own.

Standard output belongs to the answers, so whatever the user's code prints is sent to standard
error.  When the daemon is gone (its end of our input closes) the worker leaves at once, even in
the middle of training: an orphan must not hold a GPU.
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
from collections.abc import Callable
from typing import Any, TextIO

from lightyear_node.errors import ConfigError, LightyearError
from lightyear_node.worker.blame import blame, keep_texts_out
from lightyear_node.worker.jobs import (
    ERROR_CONFIG,
    ERROR_DISK,
    ERROR_FULL,
    ERROR_TASK,
    FULL_ERRORS,
    PROGRESS_INTERVAL_S,
)

DISK_ERRORS = {
    errno.ENOSPC: ERROR_FULL,
    errno.EDQUOT: ERROR_FULL,
    errno.EROFS: ERROR_DISK,
    errno.EIO: ERROR_DISK,
}

DISK_HINT = "check the disk of the state directory, and those that the task writes to"
HIDDEN_HINT = (
    "its text is not shown, for it may name training data: `log: {task_errors: full}` in node.yaml"
    " shows it in the log, `lightyear-node check` on the screen if building fails"
)


def main() -> None:
    full = FULL_ERRORS in sys.argv
    if not full:
        keep_texts_out()
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    # What the task prints is told line by line, and not when some buffer is full.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    jobs: queue.Queue[str] = queue.Queue(maxsize=4)
    threading.Thread(target=_read_jobs, args=(jobs,), daemon=True).start()

    # Imported only now, so that the reader above already notices a daemon that has gone.
    from lightyear_node.worker.duties import Duties

    duties = Duties()
    while True:
        request = json.loads(jobs.get())
        _answer(answers, request, duties.do, full)


def _read_jobs(jobs: queue.Queue[str]) -> None:
    for line in sys.stdin:
        jobs.put(line)
    os._exit(0)


def _answer(
    answers: TextIO, request: dict[str, Any], do: Callable[..., dict[str, Any]], full: bool
) -> None:
    number = request.pop("id")
    last_told = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last_told
        now = time.monotonic()
        if now - last_told >= PROGRESS_INTERVAL_S or done == total:
            last_told = now
            _write(answers, {"id": number, "progress": [done, total]})

    try:
        answer: dict[str, Any] = {"ok": do(request.pop("job"), progress, **request)}
    except ConfigError as problem:
        answer = {"error": ERROR_CONFIG, "message": str(problem), "hint": problem.hint}
    except LightyearError as problem:
        answer = {"error": ERROR_TASK, "message": str(problem), "hint": problem.hint}
    except Exception as problem:  # the user's own code: anything can come out of it
        if isinstance(problem, OSError) and problem.errno in DISK_ERRORS:
            kind = DISK_ERRORS[problem.errno]
            answer = {"error": kind, "message": blame(problem, full=full), "hint": DISK_HINT}
        else:
            if full:
                traceback.print_exc()
            hint = None if full else HIDDEN_HINT
            answer = {"error": ERROR_TASK, "message": blame(problem, full=full), "hint": hint}
    _write(answers, {"id": number, **answer})


def _write(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
