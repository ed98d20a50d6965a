"""Runs a suite: many small federations, several at a time, each in a child process.

Finished results are on disk and are kept, whatever ends the run; `resume` continues with the rest.
A failed job is recorded and the others go on.  Orchestration only: `suite` and `jobs` define what
is run, `result_folder` stores results, `live_view` shows progress, `experiment_report` the results.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shlex
import shutil
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from lightyear_node.errors import ConfigError, LightyearError
from lightyear_node.lab import run_manifest
from lightyear_node.lab.jobs import (
    AcceptanceJob,
    Job,
    Row,
    copied_row,
    expand,
    expand_acceptance,
    failed_row,
    row_of,
)
from lightyear_node.lab.live_view import AnyJob, ChildSlot, Finished, RunProgress, show_progress
from lightyear_node.lab.process_pool import ProcessPool, child_environment, run_until_signal
from lightyear_node.lab.result_folder import ResultFolder, read_lines
from lightyear_node.lab.results_reader import ACCEPTANCE_NAME, MANIFEST_NAME
from lightyear_node.lab.simulation_records import SimulationResult
from lightyear_node.lab.suite import Suite, load_suite, nearest
from lightyear_node.lab.training_cache import CacheSettings, remove_unfinished
from lightyear_node.lab.training_key import package_inputs
from lightyear_node.observe.progress import duration

SIMULATE = "lightyear_node.lab.simulation_process"
ACCEPTANCE = "lightyear_node.lab.acceptance"
CACHE_NAME = "training-cache"


class Interrupted(LightyearError):
    """SIGINT, SIGTERM or SIGHUP."""

    exit_code = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentOptions:
    suite: Path
    out: Path
    resume: bool = False
    jobs: int | None = None
    """Number of parallel jobs; the number of cores by default."""
    data: Path | None = None
    only: str | None = None
    """Name of the only grid to run."""
    view: bool = True
    cache_max: float | None = None
    """GiB of trained models that jobs keep for each other; None if every job trains by itself."""


@dataclass(frozen=True, slots=True)
class ExperimentOutcome:
    suite: str
    directory: Path
    total: int
    before: int
    """Number of jobs that were finished before this run."""
    failures: Sequence[tuple[str, str]]
    """Description and error of each failed job."""
    seconds: float
    page: Path | None
    """None if there were no results."""

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


def run(options: ExperimentOptions, console: Console | None = None) -> ExperimentOutcome:
    """Run the whole experiment; progress is shown on `console`."""
    console = console or Console(stderr=True)
    suite = load_suite(options.suite)
    _check_only(suite, options.only)
    run_manifest.check_data(suite, options.data)
    if importlib.util.find_spec("matplotlib") is None:
        # Checked before hours of work.
        raise ConfigError("the report needs matplotlib", hint="pip install 'lightyear-node[demo]'")
    began = time.monotonic()
    with ResultFolder(options.out) as folder:
        runner = _Runner(options, suite, folder, console)
        runner.run(began)
        page = None
        if any("failed" not in row for row in read_lines(folder.results)):
            from lightyear_node.lab.experiment_report import write_report

            page = write_report(options.out)
    return ExperimentOutcome(
        suite=suite.name,
        directory=options.out,
        total=runner.progress.total,
        before=runner.progress.before,
        failures=runner.failures,
        seconds=time.monotonic() - began,
        page=page,
    )


def _check_only(suite: Suite, only: str | None) -> None:
    names = [grid.name for grid in suite.grids]
    if only is not None and only not in names:
        raise ConfigError(f"the suite has no grid `{only}`", hint=nearest(only, names))


class _Runner:
    """One run: executes the jobs of a suite that have no result in the folder yet."""

    def __init__(
        self, options: ExperimentOptions, suite: Suite, folder: ResultFolder, console: Console
    ) -> None:
        self._options, self._suite, self._folder = options, suite, folder
        self._console = console
        self._environment = child_environment(options.data)
        self._slot_count = options.jobs or os.cpu_count() or 1
        self._jobs = [job for job in expand(suite) if options.only in (None, job.grid)]
        self._acceptance = expand_acceptance(suite) if options.only is None else []
        self._cache: CacheSettings | None = None
        self._trainings: Counter[str] = Counter()
        self._queue: deque[list[Job] | AcceptanceJob] = deque()
        self._finished: Finished = lambda job, outcome: None
        self.failures: list[tuple[str, str]] = []
        self.progress = RunProgress(
            suite=suite.name,
            total=len(self._jobs) + len(self._acceptance),
            slots=[ChildSlot() for _ in range(self._slot_count)],
        )

    def run(self, began: float) -> None:
        if not self._options.resume:
            self._folder.require_empty()
        self._enqueue()
        record = self._manifest()
        earlier_s = record["seconds"]
        self._trainings.update(record["trainings"])
        self._cache = self._cache_settings(record["data"])
        try:
            with show_progress(
                self._console, self.progress, shown=self._options.view
            ) as self._finished:
                run_until_signal(self._all())
            record["finished"] = run_manifest.now()
        except KeyboardInterrupt:
            raise self._interrupted() from None
        finally:
            measured = (job.key for job in expand_acceptance(self._suite))
            self._folder.join_parts(measured, ACCEPTANCE_NAME)
            record["seconds"] = round(earlier_s + time.monotonic() - began, 3)
            record["trainings"] = dict(self._trainings)
            if record["finished"] is not None and not self.failures:
                shutil.rmtree(self._cache_folder, ignore_errors=True)
            self._folder.write_json(MANIFEST_NAME, record)

    def _manifest(self) -> dict[str, Any]:
        """Write the manifest before the work; keep the start and duration of an earlier run."""
        text = self._options.suite.read_text(encoding="utf-8")
        record = run_manifest.describe(
            self._suite,
            text,
            jobs=len(expand(self._suite)),
            acceptance=len(expand_acceptance(self._suite)),
            data=self._options.data,
            cores=self._slot_count,
        )
        earlier = self._folder.read_json(MANIFEST_NAME) if self._options.resume else {}
        record |= {
            "started": earlier.get("started") or run_manifest.now(),
            "finished": None,
            "seconds": earlier.get("seconds") or 0.0,
            "trainings": {"total": 0, "cached": 0, **(earlier.get("trainings") or {})},
        }
        self._folder.write_json(MANIFEST_NAME, record)
        return record

    @property
    def _cache_folder(self) -> Path:
        return self._options.out / CACHE_NAME

    def _cache_settings(self, data: Mapping[str, str]) -> CacheSettings | None:
        if self._options.cache_max is None:
            return None
        folder = self._cache_folder.resolve()
        remove_unfinished(folder)
        bytes_max = int(self._options.cache_max * 2**30)
        return CacheSettings(str(folder), bytes_max, package_inputs(), data)

    def _enqueue(self) -> None:
        """Queue the jobs without a result; jobs with the same work together."""
        rows, others = self._folder.select(job.key for job in expand(self._suite))
        if others:
            self._print(f"left out: {len(others)} results that are not in this suite")
        done = {key: row for key, row in rows.items() if "failed" not in row}
        computed = [row for row in (*others.values(), *done.values()) if "failed" not in row]
        by_work = {row["work"]: row for row in computed}
        groups: dict[str, list[Job]] = {}
        for job in self._jobs:
            if job.key in done:
                self.progress.costs.add(job, done[job.key]["seconds"])
            elif job.work in by_work:
                # Computed already for another job.
                self._folder.append([copied_row(by_work[job.work], self._suite.name, job)])
            else:
                groups.setdefault(job.work, []).append(job)
        measured = [job for job in self._acceptance if self._folder.part(job.key).exists()]
        self._queue.extend(groups.values())
        self._queue.extend(job for job in self._acceptance if job not in measured)
        self._refresh_pending()
        waiting = sum(len(one) if isinstance(one, list) else 1 for one in self._queue)
        self.progress.done = self.progress.before = self.progress.total - waiting
        if self.progress.before:
            self._print(f"{self.progress.before} of {self.progress.total} are finished already")

    async def _all(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for slot in self.progress.slots:
                    group.create_task(self._work(slot))
        except ExceptionGroup as problems:
            # The first error has cancelled the others.
            raise problems.exceptions[0] from None

    async def _work(self, slot: ChildSlot) -> None:
        async with ProcessPool(self._environment) as pool:
            while self._queue:
                work = self._queue.popleft()
                self._refresh_pending()
                first = work[0] if isinstance(work, list) else work
                slot.job, slot.since, slot.share = first, time.monotonic(), 0.0
                if isinstance(work, list):
                    await self._run_jobs(slot, pool, work)
                else:
                    await self._run_acceptance(slot, pool, work)
                slot.job = None

    async def _run_jobs(self, slot: ChildSlot, pool: ProcessPool, jobs: Sequence[Job]) -> None:
        """Run jobs that have the same work once."""
        first = next((job for job in jobs if job.curves), jobs[0])
        jobs = [first, *(job for job in jobs if job is not first)]
        try:
            cache = self._cache.to_plain() if self._cache else None
            answers = await _run_in(
                slot, pool, SIMULATE, {**first.spec().to_plain(), "cache": cache}
            )
            seconds = time.monotonic() - slot.since
            row = row_of(self._suite.name, first, SimulationResult.of(answers), seconds)
            rows = [row, *(copied_row(row, self._suite.name, job) for job in jobs[1:])]
        except LightyearError as problem:
            message = self._without_paths(problem)
            self._folder.append(failed_row(self._suite.name, job, message) for job in jobs)
            for job in jobs:
                self._failed(job, message)
            return
        self._folder.append(rows)
        self._trainings.update(row["trainings"])
        self.progress.costs.add(first, seconds)
        for job, one in zip(jobs, rows, strict=True):
            self._succeeded(job, f"{_score_text(one)} ({duration(seconds)})")

    async def _run_acceptance(self, slot: ChildSlot, pool: ProcessPool, job: AcceptanceJob) -> None:
        try:
            rows = await _run_in(slot, pool, ACCEPTANCE, job.request())
        except LightyearError as problem:
            self._failed(job, self._without_paths(problem))
            return
        self._folder.write_part(job.key, job.labelled(rows))
        self._succeeded(job, f"{len(rows)} verdicts")

    def _succeeded(self, job: AnyJob, outcome: str) -> None:
        self.progress.done += 1
        self._finished(job, outcome)

    def _failed(self, job: AnyJob, message: str) -> None:
        self.progress.failed += 1
        self.failures.append((job.description(), message))
        self._finished(job, f"failed: {message}")

    def _without_paths(self, problem: LightyearError) -> str:
        """The error without the path of the data: results may be shared."""
        message = str(problem) + (f" ({problem.hint})" if problem.hint else "")
        if self._options.data is not None:
            for path in (self._options.data.resolve(), self._options.data.absolute()):
                message = message.replace(str(path), "DATA")
        return message

    def _refresh_pending(self) -> None:
        self.progress.pending = [one[0] if isinstance(one, list) else one for one in self._queue]

    def _interrupted(self) -> Interrupted:
        options, progress = self._options, self.progress
        given = [str(options.suite), "--out", str(options.out)]
        given += ["--data", str(options.data)] if options.data else []
        given += ["--only", options.only] if options.only else []
        given += ["--no-cache"] if options.cache_max is None else []
        return Interrupted(
            f"interrupted; {progress.done} of {progress.total} jobs are finished and kept",
            hint=f"to continue: lightyear-node experiment {shlex.join(given)} --resume",
        )

    def _print(self, text: str) -> None:
        if self._options.view:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _score_text(row: Row) -> str:
    finals = [site["final"] for site in row["sites"] if not site["malfunctioning"]]
    known = [final for final in finals if final is not None]
    diverged = f", {len(finals) - len(known)} diverged" if len(known) < len(finals) else ""
    mean = f"{row['metric']} {sum(known) / len(known):.3f}" if known else "no score"
    return mean + diverged


async def _run_in(slot: ChildSlot, pool: ProcessPool, module: str, job: Row) -> Any:
    def progress(done: int, total: int) -> None:
        slot.share = done / total

    [answer] = await pool.run(module, [job], progress)
    return answer
