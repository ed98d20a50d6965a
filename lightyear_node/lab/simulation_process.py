"""Simulations in a child process, so that this one need not load torch, and memory is freed.

The child is this module.  It reads specs from standard input and answers with lines of JSON:
`{"progress": [done, total]}`, and finally `{"ok": results}` or `{"error": …}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from lightyear_node.errors import ConfigError, LightyearError
from lightyear_node.lab.federation import LabError, package_environment
from lightyear_node.lab.simulate import FOLDER_PREFIX, Progress, simulate
from lightyear_node.lab.simulation_records import SimulationResult, SimulationSpec
from lightyear_node.lab.training_cache import CacheSettings

YIELDING_NICE = 10
AUTOGROUP = Path("/proc/self/autogroup")


def simulate_in_child(
    specs: Sequence[SimulationSpec],
    progress: Progress = lambda done, total: None,
    *,
    environment: Mapping[str, str] | None = None,
) -> list[SimulationResult]:
    """Simulate in a child process, which frees its memory when it ends."""
    with SimulationProcess(specs, environment=environment) as process:
        return process.results(progress)


class SimulationProcess:
    """Simulations in a child process, which ends with the context.

    The child starts at once; `results` collects its answers.  With `yielding` it runs at low
    priority.  `environment` replaces the default, `package_environment()`.
    """

    def __init__(
        self,
        specs: Sequence[SimulationSpec],
        *,
        yielding: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        # Owned by the parent, because the child may be killed before it can clean up.
        self._folder = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX)
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__, *(["--yielding"] if yielding else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**(environment or package_environment()), "TMPDIR": self._folder.name},
            # Ctrl-C in the terminal goes to the parent only, which then ends the child.
            start_new_session=True,
        )
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `results` reports why it ended
            self._child.stdin.write(json.dumps([spec.to_plain() for spec in specs]))
            self._child.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._child.stdout is not None
        self._child.kill()
        self._child.wait()
        self._child.stdout.close()
        self._folder.cleanup()

    def results(self, progress: Progress = lambda done, total: None) -> list[SimulationResult]:
        """Wait for the child; return one result per spec."""
        assert self._child.stdout is not None
        answer: dict[str, Any] = {}
        for line in self._child.stdout:
            answer = json.loads(line)
            if "progress" in answer:
                progress(*answer["progress"])
        code = self._child.wait()
        if "error" in answer:
            kind = ConfigError if answer["error"] == "config" else LabError
            raise kind(answer["message"], hint=answer["hint"])
        if "ok" not in answer:
            raise LabError(f"the simulation ended with exit code {code}")
        return [SimulationResult.of(plain) for plain in answer["ok"]]


def answer_jobs(
    jobs: Sequence[Any],
    answers: TextIO,
    run: Callable[[Any, Progress], Any],
    steps: Callable[[Any], int],
) -> None:
    """Run jobs in the child; write one line of JSON per step, and one with the result or error.

    `run` executes one job; `steps` returns its number of steps.
    """

    def send(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")

    results = []
    try:
        import torch

        # The models are small: more threads would slow each other down.
        torch.set_num_threads(1)
        # As in the worker: a simulation must give the same bits.
        torch.set_flush_denormal(True)
        total, before = sum(map(steps, jobs)), 0
        for job in jobs:

            def step(done: int, of: int, before: int = before) -> None:
                send(progress=[before + done, total])

            results.append(run(job, step))
            before += steps(job)
    except LightyearError as problem:
        kind = "config" if isinstance(problem, ConfigError) else "failed"
        send(error=kind, message=str(problem), hint=problem.hint)
        sys.exit(problem.exit_code)
    send(ok=results)


def answer_all(jobs: Sequence[Any], answers: TextIO) -> None:
    """Simulate each spec; specs and results are plain values.

    A spec may have a further key `cache`, the plain values of `CacheSettings`.
    """

    def run(job: Mapping[str, Any], progress: Progress) -> Any:
        cache = CacheSettings.of(job["cache"]) if job.get("cache") else None
        return simulate(SimulationSpec.of(job), progress, cache=cache).to_plain()

    answer_jobs(
        jobs,
        answers,
        run,
        lambda job: job["rounds"] * len(job["sites"]),
    )


def _yield_to_others() -> None:
    os.nice(YIELDING_NICE)
    # Linux may schedule each session as one group; `nice` then has an effect within it only.
    with contextlib.suppress(OSError):
        AUTOGROUP.write_text(str(YIELDING_NICE))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    # What the task prints goes to stderr, not between the answers.
    os.dup2(2, 1)
    if "--yielding" in sys.argv[1:]:
        _yield_to_others()
    answer_all(json.load(sys.stdin), answers)


if __name__ == "__main__":
    main()
