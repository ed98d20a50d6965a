"""The daemon's grip on its worker: starts the child, gives it jobs, notices when it dies.

Spawned, never forked: a fork of a process that runs gRPC inherits its threads' locks.  The worker
is told everything it needs with every job, so a new one can take over after any death.  What the
user's code prints goes, line by line, to whoever wants to hear it, or to our own standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from lightyear_node.errors import (
    ConfigError,
    DiskFull,
    StoreError,
    TaskFailed,
    WorkerDied,
    WorkerSilent,
)
from lightyear_node.worker.jobs import (
    ANSWER_BYTES_MAX,
    ERROR_CONFIG,
    ERROR_DISK,
    ERROR_FULL,
    ERROR_TASK,
    FULL_ERRORS,
)
from lightyear_node.worker.output import Lines

STOP_TIMEOUT_S = 5.0
OUTPUT_BYTES = 16 << 10
LAST_WORDS_S = 1.0

_KINDS = {
    ERROR_CONFIG: ConfigError,
    ERROR_DISK: StoreError,
    ERROR_FULL: DiskFull,
    ERROR_TASK: TaskFailed,
}

Progress = Callable[[str, int, int], None]


class Worker:
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
    ) -> None:
        """With `full_errors`, what its exceptions say is told; it may name training data."""
        self._opening = opening
        self._silence_s = silence_s
        self._environment = {**os.environ, **(environment or {})}
        self._on_progress = on_progress
        self._on_output = on_output
        self._options = [FULL_ERRORS] if full_errors else []
        self._listening: asyncio.Task[None] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._child: asyncio.subprocess.Process | None = None
        self._number = 0

    @property
    def pid(self) -> int | None:
        alive = self._child is not None and self._child.returncode is None
        return self._child.pid if self._child is not None and alive else None

    async def open(self) -> dict[str, Any]:
        """Start the child and build the user's task in it."""
        async with self._one_at_a_time:
            return await self._start()

    async def call(self, job: str, **arguments: Any) -> dict[str, Any]:
        """Do one job; raises `WorkerDied` when the child is gone, `TaskFailed` when it refused."""
        async with self._one_at_a_time:
            if self._child is None:
                await self._start()
            elif self._child.returncode is not None:
                how = _how(await self._bury(self._child))
                raise WorkerDied(f"the worker died {how} before `{job}`")
            return await self._ask(job, arguments)

    async def stop(self) -> None:
        child, self._child = self._child, None
        if child is None or child.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await child.wait()
        except TimeoutError:
            await self._bury(child)
        await self._hear_out()

    async def _start(self) -> dict[str, Any]:
        self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "lightyear_node.worker",
            *self._options,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE if self._on_output else None,
            limit=ANSWER_BYTES_MAX,
            env=self._environment,
        )
        if self._on_output is not None and self._child.stderr is not None:
            listen = self._listen(self._child.stderr, self._on_output)
            self._listening = asyncio.get_running_loop().create_task(listen)
        return await self._ask("open", self._opening)

    async def _listen(self, output: asyncio.StreamReader, tell: Callable[[str], None]) -> None:
        """Until the child, and all that it has started, are gone."""
        lines, clock = Lines(), asyncio.get_running_loop().time
        while content := await output.read(OUTPUT_BYTES):
            for line in lines.feed(content, clock()):
                tell(line)
        for line in lines.end(clock()):
            tell(line)

    async def _hear_out(self) -> None:
        """The last words of a child that has ended; those whom it left behind are not heard."""
        listening, self._listening = self._listening, None
        if listening is not None:
            await asyncio.wait([listening], timeout=LAST_WORDS_S)
            listening.cancel()

    async def _ask(self, job: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        child = self._child
        assert child is not None
        assert child.stdin is not None
        self._number += 1
        request = json.dumps({"id": self._number, "job": job, **arguments})
        try:
            with contextlib.suppress(ConnectionError):  # a dead child is noticed by its silence
                child.stdin.write(request.encode() + b"\n")
                await child.stdin.drain()
            answer = await self._answer(child, job)
        except asyncio.CancelledError:
            # A half-done job would answer the next question.
            await self._bury(child)
            raise
        if "error" not in answer:
            return dict(answer["ok"])
        raise _KINDS[answer["error"]](answer["message"], hint=answer["hint"])

    async def _answer(self, child: asyncio.subprocess.Process, job: str) -> dict[str, Any]:
        assert child.stdout is not None
        while True:
            try:
                async with asyncio.timeout(self._silence_s):
                    line = await child.stdout.readline()
            except TimeoutError:
                await self._bury(child)
                raise WorkerSilent(f"the worker said nothing for {self._silence_s:.0f} s") from None
            except ValueError:
                await self._bury(child)
                raise WorkerDied("the worker's answer was longer than 1 MiB") from None
            if not line:
                how = _how(await child.wait())
                await self._bury(child)
                raise WorkerDied(f"the worker died {how} during `{job}`")
            answer = json.loads(line)
            if answer["id"] != self._number:
                continue
            if "progress" not in answer:
                return dict(answer)
            self._on_progress(job, *answer["progress"])

    async def _bury(self, child: asyncio.subprocess.Process) -> int:
        """Make sure that it is dead, and forget it: the next job starts another."""
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        self._child = None
        code = await child.wait()
        await self._hear_out()
        return code


def _how(code: int) -> str:
    if code >= 0:
        return f"(exit code {code})"
    name = signal.Signals(-code).name
    memory = ", perhaps out of memory" if -code == signal.SIGKILL else ""
    return f"({name}{memory})"
