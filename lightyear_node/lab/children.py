"""Work in a child process: one question in, lines of progress out, one answer, and nothing left.

The child is a module of this package that reads JSON on standard input and writes lines of
`{"progress": [done, total]}` and at last `{"ok": …}` or `{"error": …}`.  It has its own process
group and its own temporary folder; both are gone when the call returns, whatever ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

from lightyear_node.errors import ConfigError
from lightyear_node.lab.federation import LabError, package_environment
from lightyear_node.lab.simulate import FOLDER_PREFIX
from lightyear_node.tasks import DATA_VARIABLE

ANSWER_BYTES_MAX = 1 << 28
"""A long federation's verdicts are megabytes; more than this is no answer of ours."""
COMPLAINT_BYTES_MAX = 4096
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""The models of a trial are small: more threads would only wait for each other."""

Progress = Callable[[int, int], None]
Result = TypeVar("Result")


def child_environment(data: Path | None) -> dict[str, str]:
    """`data` is the directory of the prepared data sets."""
    named = {} if data is None else {DATA_VARIABLE: str(data.resolve())}
    return {**package_environment(), **THREADS, **named}


async def ask(
    module: str,
    question: Any,
    environment: Mapping[str, str],
    progress: Progress = lambda done, total: None,
) -> Any:
    """The child's answer; its failure is raised as ours.  Cancelling ends the child."""
    with _workplace() as (folder, complaints):
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # Not the terminal's: it would tear up what is shown there.
                stderr=complaints,
                env={**environment, "TMPDIR": folder},
                # Ctrl-C at the terminal is for us; we end the child.
                start_new_session=True,
                limit=ANSWER_BYTES_MAX,
            )
        except OSError as problem:
            raise LabError(f"no process could be started: {problem.strerror}") from None
        try:
            answer = await _converse(child, question, progress)
            code = await child.wait()
        finally:
            # The whole group: a task may have started processes to load its data.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
        return _checked(answer, code, Path(complaints.name))


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


@contextlib.contextmanager
def _workplace() -> Iterator[tuple[str, IO[bytes]]]:
    """A temporary folder, and the file in it for what the child complains about."""
    with (
        tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True) as folder,
        Path(folder, "complaints").open("wb") as complaints,
    ):
        yield folder, complaints


async def _converse(
    child: asyncio.subprocess.Process, question: Any, progress: Progress
) -> dict[str, Any]:
    assert child.stdin is not None
    assert child.stdout is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its exit code says why
        child.stdin.write(json.dumps(question).encode())
        await child.stdin.drain()
        child.stdin.close()
    answer: dict[str, Any] = {}
    try:
        async for line in child.stdout:
            answer = json.loads(line)
            if "progress" in answer:
                progress(*answer["progress"])
    except ValueError:  # killed in the middle of a line, or a line beyond all limits
        return {}
    return answer


def _checked(answer: Mapping[str, Any], code: int, complaints: Path) -> Any:
    if "error" in answer:
        kind = ConfigError if answer["error"] == "config" else LabError
        raise kind(answer["message"], hint=answer.get("hint"))
    if "ok" in answer:
        return answer["ok"]
    last_words = _last_line(complaints)
    raise LabError(f"the process {_ended(code)}" + (f": {last_words}" if last_words else ""))


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def _last_line(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - COMPLAINT_BYTES_MAX))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
