"""What the worker process reports while it works: progress, and what the task prints."""

from __future__ import annotations

from lightyear_node.observe.observer import Observer


class WorkerActivity:
    """Counts progress reports; peers see the count and so know that this site is not stuck."""

    def __init__(self, observer: Observer, *, log_output: bool) -> None:
        self._observer = observer
        self._log_output = log_output
        self.count = 0

    def progressed(self, job: str, done: int, total: int) -> None:
        self.count += 1
        self._observer.progress = (done, total)
        self._observer.current_jobs.worked(job, done, total)

    def printed(self, line: str) -> None:
        if self._log_output:
            self._observer.log.info("task: %s", line, extra={"event": "task_output"})
