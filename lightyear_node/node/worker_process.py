"""The worker process, seen from the daemon: starts it, sends jobs, detects when it dies.

Spawned, never forked: a fork of a process that runs gRPC inherits its threads' locks.  Every job
contains everything that the worker needs, so a new process can take over at any time.  What the
user's code prints goes line by line to `on_output`, or to our own standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightyear_node.errors import (
    ConfigError,
    DiskFull,
    StoreError,
    TaskFailed,
    TooManyFiles,
    WorkerDied,
    WorkerSilent,
)
from lightyear_node.node.worker_output import OutputLines
from lightyear_node.storage.file_descriptors import exhaustion_raised
from lightyear_node.worker.job_types import (
    ANSWER_BYTES_MAX,
    ERROR_CONFIG,
    ERROR_DISK,
    ERROR_FILES,
    ERROR_FULL,
    ERROR_TASK,
    FULL_ERRORS,
    MEMORY_MAX,
)
from lightyear_node.worker.memory_limit import describe_limit

WORKER_PROGRAM = ("lightyear_node.worker",)
STOP_TIMEOUT_S = 5.0
OUTPUT_BYTES = 16 << 10
OUTPUT_DRAIN_S = 1.0
EXIT_POLL_S = 0.02

_KINDS = {
    ERROR_CONFIG: ConfigError,
    ERROR_DISK: StoreError,
    ERROR_FULL: DiskFull,
    ERROR_FILES: TooManyFiles,
    ERROR_TASK: TaskFailed,
}

Progress = Callable[[str, int, int], None]


class WorkerProcess:
    """One job at a time; `opening` is the first job of every new child."""

    def __init__(
        self,
        opening: Mapping[str, Any],
        *,
        silence_s: float,
        environment: Mapping[str, str] | None = None,
        on_progress: Progress = lambda job, done, total: None,
        on_output: Callable[[str], None] | None = None,
        full_errors: bool = False,
        memory_max: int | None = None,
        program: Sequence[str] = WORKER_PROGRAM,
    ) -> None:
        """`full_errors` passes on the texts of the task's exceptions; they may name patients.

        `program` is a module and its arguments, for `python -m`.
        """
        self._opening = opening
        self._silence_s = silence_s
        self._environment = {**os.environ, **(environment or {})}
        self._on_progress = on_progress
        self._on_output = on_output
        self._program = program
        self._options = [FULL_ERRORS] if full_errors else []
        self._options += [f"{MEMORY_MAX}{memory_max}"] if memory_max is not None else []
        self._memory_max = memory_max
        self._forwarding: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._child: asyncio.subprocess.Process | None = None
        self._number = 0

    @property
    def pid(self) -> int | None:
        alive = self._child is not None and self._child.returncode is None
        return self._child.pid if self._child is not None and alive else None

    async def open(self) -> dict[str, Any]:
        """Start the child and build the user's task in it."""
        async with self._lock:
            return await self._start()

    async def call(
        self, job: str, *, silence_s: float = math.inf, **arguments: Any
    ) -> dict[str, Any]:
        """Do one job; raises `WorkerDied` if the process died, `TaskFailed` if the task raised.

        `silence_s` shortens the configured limit of silence, for jobs that report often.
        """
        async with self._lock:
            if self._child is None:
                await self._start()
            elif self._child.returncode is not None:
                how = self._exit_text(await self._kill(self._child))
                raise WorkerDied(f"the worker died {how} before `{job}`")
            return await self._ask(job, arguments, silence_s)

    async def stop(self) -> None:
        child, self._child = self._child, None
        if child is None or child.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await _exit_code(child)
        except TimeoutError:
            await self._kill(child)
        await self._drain_output()

    async def _start(self) -> dict[str, Any]:
        with exhaustion_raised("the worker cannot be started"):
            self._child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *self._program,
                *self._options,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE if self._on_output else None,
                limit=ANSWER_BYTES_MAX,
                env=self._environment,
            )
        if self._on_output is not None and self._child.stderr is not None:
            forward = self._forward_output(self._child.stderr, self._on_output)
            self._forwarding = asyncio.get_running_loop().create_task(forward)
        return await self._ask("open", self._opening)

    async def _forward_output(
        self, output: asyncio.StreamReader, tell: Callable[[str], None]
    ) -> None:
        """Forward output until the process and all its children have ended."""
        lines, clock = OutputLines(), asyncio.get_running_loop().time
        while content := await output.read(OUTPUT_BYTES):
            for line in lines.feed(content, clock()):
                tell(line)
        for line in lines.end(clock()):
            tell(line)

    async def _drain_output(self) -> None:
        """Wait briefly for the remaining output of an ended process."""
        forwarding, self._forwarding = self._forwarding, None
        if forwarding is not None:
            await asyncio.wait([forwarding], timeout=OUTPUT_DRAIN_S)
            forwarding.cancel()

    async def _ask(
        self, job: str, arguments: Mapping[str, Any], silence_s: float = math.inf
    ) -> dict[str, Any]:
        child = self._child
        assert child is not None
        assert child.stdin is not None
        self._number += 1
        request = json.dumps({"id": self._number, "job": job, **arguments})
        try:
            with contextlib.suppress(ConnectionError):  # a dead process is detected below
                child.stdin.write(request.encode() + b"\n")
                await child.stdin.drain()
            answer = await self._answer(child, job, min(silence_s, self._silence_s))
        except asyncio.CancelledError:
            # The answer of the cancelled job would be taken for that of the next one.
            await self._kill(child)
            raise
        if "error" not in answer:
            return dict(answer["ok"])
        raise _KINDS[answer["error"]](answer["message"], hint=answer["hint"])

    async def _answer(
        self, child: asyncio.subprocess.Process, job: str, silence_s: float
    ) -> dict[str, Any]:
        assert child.stdout is not None
        while True:
            try:
                async with asyncio.timeout(silence_s):
                    line = await child.stdout.readline()
            except TimeoutError:
                await self._kill(child)
                raise WorkerSilent(f"the worker said nothing for {silence_s:.0f} s") from None
            except ValueError:
                await self._kill(child)
                raise WorkerDied("the worker's answer was longer than 1 MiB") from None
            if not line:
                how = self._exit_text(await _exit_code(child))
                await self._kill(child)
                raise WorkerDied(f"the worker died {how} during `{job}`")
            answer = json.loads(line)
            if answer["id"] != self._number:
                continue
            if "progress" not in answer:
                return dict(answer)
            self._on_progress(job, *answer["progress"])

    async def _kill(self, child: asyncio.subprocess.Process) -> int:
        """Kill the process; the next job starts another one."""
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        self._child = None
        code = await _exit_code(child)
        await self._drain_output()
        return code

    def _exit_text(self, code: int) -> str:
        """Describe the exit code, with a possible cause."""
        name = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        if self._memory_max is not None and code != 0:
            name += f", perhaps out of memory: {describe_limit(self._memory_max)}"
        elif -code == signal.SIGKILL:
            name += ", perhaps out of memory"
        return f"({name})"


async def _exit_code(child: asyncio.subprocess.Process) -> int:
    """Wait until the process has ended.

    `child.wait()` would also wait for processes that it has forked, which keep its output open.
    """
    while child.returncode is None:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(EXIT_POLL_S)
    return child.returncode
