"""Runs a suite: many small federations, several at a time, each in a child process of its own.

What is finished is on the disk and stays there, whatever ends the run; `resume` goes on with the
rest.  A job that fails is recorded and the others go on.  Orchestration only: what to run is in
`suite` and `jobs`, results go to `result_file`, what is seen meanwhile is `lanes`, and `publish`
makes the report.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shlex
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from lightyear_node.errors import ConfigError, LightyearError
from lightyear_node.lab import manifest
from lightyear_node.lab.children import Nursery, child_environment, run_until_signal
from lightyear_node.lab.jobs import (
    AcceptanceJob,
    Job,
    Row,
    expand,
    expand_acceptance,
    failed_row,
    retold,
    row_of,
)
from lightyear_node.lab.lanes import AnyJob, Board, Finished, Lane, showing
from lightyear_node.lab.result_file import Folder, read_lines
from lightyear_node.lab.rows import ACCEPTANCE_NAME, MANIFEST_NAME
from lightyear_node.lab.simulate import SimResult
from lightyear_node.lab.suite import Suite, load_suite, nearest
from lightyear_node.observe.words import duration

SIMULATE = "lightyear_node.lab.simulate"
ACCEPTANCE = "lightyear_node.lab.acceptance"


class Interrupted(LightyearError):
    """Ctrl-C, a plain `kill` or a closed terminal."""

    exit_code = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    suite: Path
    out: Path
    resume: bool = False
    jobs: int | None = None
    """How many at a time; as many as there are cores by default."""
    data: Path | None = None
    only: str | None = None
    """The name of the one grid to run."""
    view: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    suite: str
    directory: Path
    total: int
    before: int
    """How many were finished when this run began."""
    failures: Sequence[tuple[str, str]]
    """Each failed job in words, and why it failed."""
    seconds: float
    page: Path | None
    """None if there was nothing to draw."""

    def to_plain(self) -> dict[str, Any]:
        return {
            "suite": self.suite,
            "directory": str(self.directory),
            "jobs": {
                "total": self.total,
                "finished": self.total - len(self.failures),
                "finished_before": self.before,
                "failed": len(self.failures),
            },
            "failed": [{"job": job, "message": message} for job, message in self.failures],
            "seconds": round(self.seconds, 3),
            "report": str(self.page) if self.page else None,
        }


def run(options: Options, console: Console | None = None) -> Outcome:
    """The whole experiment; words for people go to `console`."""
    console = console or Console(stderr=True)
    suite = load_suite(options.suite)
    _check_only(suite, options.only)
    manifest.check_data(suite, options.data)
    if importlib.util.find_spec("matplotlib") is None:
        # Said before hours of work rather than after them.
        raise ConfigError("the report needs matplotlib", hint="pip install 'lightyear-node[demo]'")
    began = time.monotonic()
    with Folder(options.out) as folder:
        runner = _Runner(options, suite, folder, console)
        runner.run(began)
        page = None
        if any("failed" not in row for row in read_lines(folder.results)):
            from lightyear_node.lab.publish import publish

            page = publish(options.out)
    return Outcome(
        suite=suite.name,
        directory=options.out,
        total=runner.board.total,
        before=runner.board.before,
        failures=runner.failures,
        seconds=time.monotonic() - began,
        page=page,
    )


def _check_only(suite: Suite, only: str | None) -> None:
    names = [grid.name for grid in suite.grids]
    if only is not None and only not in names:
        raise ConfigError(f"the suite has no grid `{only}`", hint=nearest(only, names))


class _Runner:
    """One run over one folder, from the lines that are there to the lines that were missing."""

    def __init__(self, options: Options, suite: Suite, folder: Folder, console: Console) -> None:
        self._options, self._suite, self._folder = options, suite, folder
        self._console = console
        self._environment = child_environment(options.data)
        self._lane_count = options.jobs or os.cpu_count() or 1
        self._jobs = [job for job in expand(suite) if options.only in (None, job.grid)]
        self._acceptance = expand_acceptance(suite) if options.only is None else []
        self._queue: deque[list[Job] | AcceptanceJob] = deque()
        self._finished: Finished = lambda job, outcome: None
        self.failures: list[tuple[str, str]] = []
        self.board = Board(
            suite=suite.name,
            total=len(self._jobs) + len(self._acceptance),
            lanes=[Lane() for _ in range(self._lane_count)],
        )

    def run(self, began: float) -> None:
        if not self._options.resume:
            self._folder.refuse_results()
        self._enqueue()
        record = self._manifest()
        earlier_s = record["seconds"]
        try:
            with showing(self._console, self.board, shown=self._options.view) as self._finished:
                run_until_signal(self._all())
            record["finished"] = manifest.now()
        except KeyboardInterrupt:
            raise self._interrupted() from None
        finally:
            measured = (job.key for job in expand_acceptance(self._suite))
            self._folder.join_parts(measured, ACCEPTANCE_NAME)
            record["seconds"] = round(earlier_s + time.monotonic() - began, 3)
            self._folder.write_json(MANIFEST_NAME, record)

    def _manifest(self) -> dict[str, Any]:
        """Begun before the work; of an earlier run its start and its time are kept."""
        text = self._options.suite.read_text(encoding="utf-8")
        record = manifest.describe(
            self._suite,
            text,
            jobs=len(expand(self._suite)),
            acceptance=len(expand_acceptance(self._suite)),
            data=self._options.data,
            cores=self._lane_count,
        )
        earlier = self._folder.read_json(MANIFEST_NAME) if self._options.resume else {}
        record |= {
            "started": earlier.get("started") or manifest.now(),
            "finished": None,
            "seconds": earlier.get("seconds") or 0.0,
        }
        self._folder.write_json(MANIFEST_NAME, record)
        return record

    def _enqueue(self) -> None:
        """What is not there yet; jobs with the same work together."""
        rows, others = self._folder.settle(job.key for job in expand(self._suite))
        if others:
            self._say(f"left out: {len(others)} results that this suite does not ask for")
        done = {key: row for key, row in rows.items() if "failed" not in row}
        computed = [row for row in (*others.values(), *done.values()) if "failed" not in row]
        by_work = {row["work"]: row for row in computed}
        groups: dict[str, list[Job]] = {}
        for job in self._jobs:
            if job.key in done:
                self.board.costs.add(job, done[job.key]["seconds"])
            elif job.work in by_work:
                # Computed already, under another name.
                self._folder.append([retold(by_work[job.work], self._suite.name, job)])
            else:
                groups.setdefault(job.work, []).append(job)
        measured = [job for job in self._acceptance if self._folder.part(job.key).exists()]
        self._queue.extend(groups.values())
        self._queue.extend(job for job in self._acceptance if job not in measured)
        self._refresh_pending()
        waiting = sum(len(one) if isinstance(one, list) else 1 for one in self._queue)
        self.board.done = self.board.before = self.board.total - waiting
        if self.board.before:
            self._say(f"{self.board.before} of {self.board.total} are finished already")

    async def _all(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for lane in self.board.lanes:
                    group.create_task(self._work(lane))
        except ExceptionGroup as problems:
            # The first has ended the others.
            raise problems.exceptions[0] from None

    async def _work(self, lane: Lane) -> None:
        async with Nursery(self._environment) as nursery:
            while self._queue:
                work = self._queue.popleft()
                self._refresh_pending()
                first = work[0] if isinstance(work, list) else work
                lane.job, lane.since, lane.share = first, time.monotonic(), 0.0
                if isinstance(work, list):
                    await self._run_jobs(lane, nursery, work)
                else:
                    await self._run_acceptance(lane, nursery, work)
                lane.job = None

    async def _run_jobs(self, lane: Lane, nursery: Nursery, jobs: Sequence[Job]) -> None:
        """All have the same work."""
        first = jobs[0]
        try:
            answers = await _ask(lane, nursery, SIMULATE, first.spec().to_plain())
            seconds = time.monotonic() - lane.since
            row = row_of(self._suite.name, first, SimResult.of(answers), seconds)
            rows = [row, *(retold(row, self._suite.name, job) for job in jobs[1:])]
        except LightyearError as problem:
            message = self._without_paths(problem)
            self._folder.append(failed_row(self._suite.name, job, message) for job in jobs)
            for job in jobs:
                self._failed(job, message)
            return
        self._folder.append(rows)
        self.board.costs.add(first, seconds)
        for job, one in zip(jobs, rows, strict=True):
            self._succeeded(job, f"{_in_short(one)} ({duration(seconds)})")

    async def _run_acceptance(self, lane: Lane, nursery: Nursery, job: AcceptanceJob) -> None:
        try:
            rows = await _ask(lane, nursery, ACCEPTANCE, job.question())
        except LightyearError as problem:
            self._failed(job, self._without_paths(problem))
            return
        self._folder.write_part(job.key, job.told(rows))
        self._succeeded(job, f"{len(rows)} verdicts")

    def _succeeded(self, job: AnyJob, outcome: str) -> None:
        self.board.done += 1
        self._finished(job, outcome)

    def _failed(self, job: AnyJob, message: str) -> None:
        self.board.failed += 1
        self.failures.append((job.in_words(), message))
        self._finished(job, f"failed: {message}")

    def _without_paths(self, problem: LightyearError) -> str:
        """Where the data lie is nobody else's business; results are made to be passed on."""
        message = str(problem) + (f" ({problem.hint})" if problem.hint else "")
        if self._options.data is not None:
            for path in (self._options.data.resolve(), self._options.data.absolute()):
                message = message.replace(str(path), "DATA")
        return message

    def _refresh_pending(self) -> None:
        self.board.pending = [one[0] if isinstance(one, list) else one for one in self._queue]

    def _interrupted(self) -> Interrupted:
        options = self._options
        given = [str(options.suite), "--out", str(options.out)]
        given += ["--data", str(options.data)] if options.data else []
        given += ["--only", options.only] if options.only else []
        return Interrupted(
            f"interrupted; {self.board.done} of {self.board.total} jobs are finished and kept",
            hint=f"to go on: lightyear-node experiment {shlex.join(given)} --resume",
        )

    def _say(self, words: str) -> None:
        if self._options.view:
            self._console.print(words, highlight=False, markup=False, soft_wrap=True)


def _in_short(row: Row) -> str:
    finals = [site["final"] for site in row["sites"] if not site["malfunctioning"]]
    known = [final for final in finals if final is not None]
    diverged = f", {len(finals) - len(known)} diverged" if len(known) < len(finals) else ""
    mean = f"{row['metric']} {sum(known) / len(known):.3f}" if known else "no score"
    return mean + diverged


async def _ask(lane: Lane, nursery: Nursery, module: str, question: Row) -> Any:
    def progress(done: int, total: int) -> None:
        lane.share = done / total

    [answer] = await nursery.ask(module, [question], progress)
    return answer
