"""Runs jobs in child processes that leave no process and no file behind.

A child answers with lines `{"progress": [done, total]}` and finally `{"ok": …}` or `{"error": …}`.
The children have a process group and a temporary folder of their own; both are removed when the
work ends, for whatever reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from lightyear_node.errors import ConfigError
from lightyear_node.lab.federation import LabError, package_environment
from lightyear_node.lab.simulate import FOLDER_PREFIX
from lightyear_node.lab.tasks import DATA_VARIABLE

POOL_MODULE = "lightyear_node.lab.process_pool_main"
ANSWER_BYTES_MAX = 1 << 28
"""Maximum length of one answer; the verdicts of a long federation are some megabytes."""
STDERR_BYTES_MAX = 4096
REMOVAL_TRIES = 40
REMOVAL_PAUSE_S = 0.05
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""The models are small: more threads would slow each other down."""

Progress = Callable[[int, int], None]
Result = TypeVar("Result")


def child_environment(data: Path | None) -> dict[str, str]:
    """The environment of a child; `data` is the directory of the prepared data sets."""
    named = {} if data is None else {DATA_VARIABLE: str(data.resolve())}
    return {**package_environment(), **THREADS, **named}


class ProcessPool:
    """Runs jobs one after the other, each in a process of its own (see `process_pool_main`).

    The parent of these processes starts with the first job.  Cancelling a job, or leaving the
    context, ends all of them.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._child: asyncio.subprocess.Process | None = None
        self._folder = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._end()

    async def run(
        self, module: str, job: Any, progress: Progress = lambda done, total: None
    ) -> Any:
        """Return the answer of the module's `answer_all`; raise its error."""
        child = self._child or await self._start()
        before = self._stderr.stat().st_size
        code: int | None = None
        try:
            answer, code = await _exchange(child, [module, job], progress)
            last_line = _last_line(self._stderr, before)
        finally:
            if code is None:  # cancelled, or the child has ended
                code = await self._end()
        return _checked(answer, code, last_line)

    async def _start(self) -> asyncio.subprocess.Process:
        self._folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX)
        try:
            with self._stderr.open("wb") as stderr:
                self._child = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    POOL_MODULE,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    # Not to the terminal, which shows the live view.
                    stderr=stderr,
                    env={**self._environment, "TMPDIR": self._folder},
                    # Ctrl-C in the terminal goes to this process only, which then ends the child.
                    start_new_session=True,
                    limit=ANSWER_BYTES_MAX,
                )
        except OSError as problem:
            raise LabError(f"no process could be started: {problem.strerror}") from None
        finally:
            if self._child is None:  # failed or cancelled
                shutil.rmtree(self._folder, ignore_errors=True)
        return self._child

    async def _end(self) -> int:
        child, self._child = self._child, None
        if child is None:
            return 0
        # The whole group: a task may have started processes to load its data.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        code = await child.wait()
        # Its job was killed, too, but may still hold files for a moment.
        for _ in range(REMOVAL_TRIES):
            if _removed(self._folder):
                break
            await asyncio.sleep(REMOVAL_PAUSE_S)
        return code

    @property
    def _stderr(self) -> Path:
        return Path(self._folder, "stderr")


def run_until_signal(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work`; SIGINT, SIGTERM and SIGHUP cancel it, which ends its children.

    Signals that the caller ignores (`nohup`) stay ignored.
    """

    async def watched() -> Result:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    loop.add_signal_handler(number, task.cancel)
        return await work

    try:
        return asyncio.run(watched())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _exchange(
    child: asyncio.subprocess.Process, request: Any, progress: Progress
) -> tuple[dict[str, Any], int | None]:
    """Return the answer and the exit code of the job; None if the child itself has ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its exit code tells why
        child.stdin.write(json.dumps(request).encode() + b"\n")
        await child.stdin.drain()
    answer: dict[str, Any] = {}
    with contextlib.suppress(ValueError):  # a line over the limit
        async for line in child.stdout:
            message = _parsed(line)
            if "ended" in message:
                return answer, message["ended"]
            answer = message
            if "progress" in answer:
                progress(*answer["progress"])
    return {}, None


def _parsed(line: bytes) -> dict[str, Any]:
    """Parse a line; a killed job may leave an unfinished one before the final message."""
    end = line.rfind(b'{"ended"')
    message: dict[str, Any] = json.loads(line[end:] if end > 0 else line)
    return message


def _checked(answer: Mapping[str, Any], code: int, last_line: str) -> Any:
    if "error" in answer:
        kind = ConfigError if answer["error"] == "config" else LabError
        raise kind(answer["message"], hint=answer.get("hint"))
    if "ok" in answer:
        return answer["ok"]
    raise LabError(f"the process {_ended(code)}" + (f": {last_line}" if last_line else ""))


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def _last_line(path: Path, since: int) -> str:
    with path.open("rb") as file:
        file.seek(max(since, path.stat().st_size - STDERR_BYTES_MAX))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _removed(folder: str) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    return not Path(folder).exists()
