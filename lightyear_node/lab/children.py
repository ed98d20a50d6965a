"""Work in child processes: a question in, lines of progress out, one answer, and nothing left.

An answer is lines of `{"progress": [done, total]}` and at last `{"ok": …}` or `{"error": …}`.  The
processes have a group and a temporary folder of their own; both are gone when the work is over,
whatever ends it.
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
from lightyear_node.tasks import DATA_VARIABLE

NURSERY = "lightyear_node.lab.nursery"
ANSWER_BYTES_MAX = 1 << 28
"""A long federation's verdicts are megabytes; more than this is no answer of ours."""
COMPLAINT_BYTES_MAX = 4096
REMOVAL_TRIES = 40
REMOVAL_PAUSE_S = 0.05
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""The models of a trial are small: more threads would only wait for each other."""

Progress = Callable[[int, int], None]
Result = TypeVar("Result")


def child_environment(data: Path | None) -> dict[str, str]:
    """`data` is the directory of the prepared data sets."""
    named = {} if data is None else {DATA_VARIABLE: str(data.resolve())}
    return {**package_environment(), **THREADS, **named}


class Nursery:
    """Answers questions, each in a process of its own; it begins with the first (see `nursery`).

    Cancelling a question, and leaving the context, ends all of its processes.
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

    async def ask(
        self, module: str, question: Any, progress: Progress = lambda done, total: None
    ) -> Any:
        """What the module's `answer_all` gives; its failure is raised as ours."""
        child = self._child or await self._begin()
        before = self._complaints.stat().st_size
        code: int | None = None
        try:
            answer, code = await _converse(child, [module, question], progress)
            last_words = _last_line(self._complaints, before)
        finally:
            if code is None:  # cancelled, or killed together with the job
                code = await self._end()
        return _checked(answer, code, last_words)

    async def _begin(self) -> asyncio.subprocess.Process:
        self._folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX)
        try:
            with self._complaints.open("wb") as complaints:
                self._child = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    NURSERY,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    # Not the terminal's: it would tear up what is shown there.
                    stderr=complaints,
                    env={**self._environment, "TMPDIR": self._folder},
                    # Ctrl-C at the terminal is for us; we end the child.
                    start_new_session=True,
                    limit=ANSWER_BYTES_MAX,
                )
        except OSError as problem:
            raise LabError(f"no process could be started: {problem.strerror}") from None
        finally:
            if self._child is None:  # also when cancelled in between
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
        # Its job was killed, too, but may still be dying with a file in its hand.
        for _ in range(REMOVAL_TRIES):
            if _removed(self._folder):
                break
            await asyncio.sleep(REMOVAL_PAUSE_S)
        return code

    @property
    def _complaints(self) -> Path:
        return Path(self._folder, "complaints")


def run_until_signal(work: Coroutine[Any, Any, Result]) -> Result:
    """Ctrl-C, a plain `kill` and a closed terminal end `work`, and with it its children.

    What the caller has chosen to ignore (`nohup`) stays ignored.
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


async def _converse(
    child: asyncio.subprocess.Process, question: Any, progress: Progress
) -> tuple[dict[str, Any], int | None]:
    """The answer, and the exit code of the process that gave it; None if nobody is left to tell."""
    assert child.stdin is not None
    assert child.stdout is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its exit code says why
        child.stdin.write(json.dumps(question).encode() + b"\n")
        await child.stdin.drain()
    answer: dict[str, Any] = {}
    with contextlib.suppress(ValueError):  # a line beyond all limits
        async for line in child.stdout:
            said = _parsed(line)
            if "ended" in said:
                return answer, said["ended"]
            answer = said
            if "progress" in answer:
                progress(*answer["progress"])
    return {}, None


def _parsed(line: bytes) -> dict[str, Any]:
    """A job that is killed in the middle of a line leaves its beginning before the last word."""
    end = line.rfind(b'{"ended"')
    said: dict[str, Any] = json.loads(line[end:] if end > 0 else line)
    return said


def _checked(answer: Mapping[str, Any], code: int, last_words: str) -> Any:
    if "error" in answer:
        kind = ConfigError if answer["error"] == "config" else LabError
        raise kind(answer["message"], hint=answer.get("hint"))
    if "ok" in answer:
        return answer["ok"]
    raise LabError(f"the process {_ended(code)}" + (f": {last_words}" if last_words else ""))


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def _last_line(path: Path, since: int) -> str:
    with path.open("rb") as file:
        file.seek(max(since, path.stat().st_size - COMPLAINT_BYTES_MAX))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _removed(folder: str) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    return not Path(folder).exists()
