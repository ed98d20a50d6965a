"""The worker seen from the daemon: a real process that may print, raise, hang or die."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightyear_node.errors import (
    ConfigError,
    DiskFull,
    StoreError,
    TaskFailed,
    TooManyFiles,
    WorkerDied,
    WorkerSilent,
)
from lightyear_node.node.worker_process import WorkerProcess
from tests.support.waiting import wait_until

TASK = """
import os, signal, sys, time
import torch
from torch import nn
from torch.nn import functional
from lightyear_node import Task

def build(mode: str = "", mark: str = "", site_name: str = "?", seed: int = -1) -> Task:
    print("the user's own words", site_name, seed)          # must not disturb the answers
    data = [(torch.randn(8, 4), torch.arange(8) % 3) for _ in range(2)]
    def train_round(model, optimizer, device):
        if mode == "raise": raise RuntimeError("no such image")
        if mode == "full": raise OSError(28, "No space left on device")
        if mode == "files": raise OSError(23, "Too many open files in system")
        if mode == "broken": raise OSError(5, "Input/output error")
        if mode == "greedy": torch.zeros(1 << 30)                  # 4 GiB
        if mode == "greedy python": bytearray(4 << 30)
        if mode == "die": os.kill(os.getpid(), signal.SIGKILL)
        if mode == "hang":
            if mark: open(mark, "w").close()
            time.sleep(3600)
    class Odd(nn.Linear):
        def forward(self, x):
            if mode == "foreign": raise ValueError("the model returned patient-7.dcm")
            return (super().forward(x), "text")
    if mode in ("pair", "foreign"): return Task(model=lambda: Odd(4, 3),
        loss=functional.cross_entropy, optimizer=torch.optim.Adam, train_data=data, val_data=data)
    return Task(model=lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)),
                loss=functional.cross_entropy, optimizer=lambda p: torch.optim.Adam(p, 1e-2),
                train_data=data, val_data=data,
                train_round=train_round if mode else None)
"""


def opening(entry: str = "hospital:build", **changed: Any) -> dict[str, Any]:
    return {
        "entry": entry,
        "args": {},
        "name": "site-a",
        "sites": ["site-a", "site-b"],
        "seed": 3,
        "rule": {"name": "lightyear"},
        "rounds": 3,
        "device": "cpu",
        "threads": 1,
        "exchange": {},
        **changed,
    }


def with_worker(
    tmp_path: Path,
    use: Callable[[WorkerProcess], Awaitable[None]],
    *,
    silence_s: float = 120.0,
    on_progress: Callable[[str, int, int], None] = lambda job, done, total: None,
    on_output: Callable[[str], None] | None = None,
    full_errors: bool = False,
    memory_max: int | None = None,
    **changed: Any,
) -> None:
    (tmp_path / "hospital.py").write_text(TASK)

    async def run() -> None:
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        worker = WorkerProcess(
            opening(**changed),
            silence_s=silence_s,
            # As most machines have it: Python keeps back what is printed into a pipe.
            environment={"PYTHONPATH": path, "PYTHONUNBUFFERED": ""},
            on_progress=on_progress,
            on_output=on_output,
            full_errors=full_errors,
            memory_max=memory_max,
        )
        try:
            await use(worker)
        finally:
            pid = worker.pid
            await worker.stop()
            assert pid is None or not psutil.pid_exists(pid)

    asyncio.run(run())


def initial_arguments(tmp_path: Path, out: str = "base") -> dict[str, Any]:
    return {"out": str(tmp_path / out), "wire_header": str(tmp_path / "header")}


def train_arguments(tmp_path: Path) -> dict[str, Any]:
    return {
        "round": 0,
        "base": str(tmp_path / "base"),
        "carry": None,
        "own": str(tmp_path / "own"),
        "outgoing": str(tmp_path / "outgoing"),
        "carry_out": str(tmp_path / "carry"),
    }


def test_a_round_of_training_and_its_progress(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []

    async def use(worker: WorkerProcess) -> None:
        opened = await worker.open()
        assert opened["parameters"] == 43
        assert (opened["head"], opened["val_samples"]) == ("2", 16)
        await worker.call("initial", **initial_arguments(tmp_path))
        answer = await worker.call("train", **train_arguments(tmp_path))
        assert answer["samples"] == 2  # a plain list of batches: its length is all there is
        assert answer["metrics"].keys() == {"loss"}
        assert (tmp_path / "own").read_bytes() != (tmp_path / "base").read_bytes()
        assert not (tmp_path / "outgoing").exists()

    with_worker(tmp_path, use, on_progress=lambda *reported: seen.append(reported))
    assert seen[-1] == ("train", 2, 2)


def test_judging_reports_progress_per_peer(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []

    async def use(worker: WorkerProcess) -> None:
        await worker.open()
        await worker.call("initial", **initial_arguments(tmp_path))
        await worker.call("train", **train_arguments(tmp_path))
        own = str(tmp_path / "own")
        peers = [
            {"peer": f"site-{letter}", "path": own, "samples": 8, "digest": "0" * 64}
            for letter in "bcd"
        ]
        answer = await worker.call(
            "judge",
            round=0,
            own=own,
            before=str(tmp_path / "base"),
            carry=str(tmp_path / "carry"),
            peers=peers,
            state={},
        )
        assert len(answer["verdicts"]) == 3

    with_worker(tmp_path, use, on_progress=lambda *reported: seen.append(reported))
    judged = [(done, total) for job, done, total in seen if job == "judge"]
    assert judged == sorted(judged)
    assert judged[-1] == (3, 3)


def test_training_again_from_the_same_files_gives_the_same_bytes(tmp_path: Path) -> None:
    """A restart after a crash relies on this; the optimizer's state comes from its file."""

    async def use(worker: WorkerProcess) -> None:
        await worker.call("initial", **initial_arguments(tmp_path))
        first = train_arguments(tmp_path)
        await worker.call("train", **first)
        second = {**first, "round": 1, "base": str(tmp_path / "own"), "own": str(tmp_path / "two")}
        second |= {"carry": str(tmp_path / "carry"), "carry_out": str(tmp_path / "carry2")}
        await worker.call("train", **second)
        undisturbed = (tmp_path / "two").read_bytes()
        await worker.stop()  # a new worker knows nothing but the files
        await worker.call("train", **second)
        assert (tmp_path / "two").read_bytes() == undisturbed
        forgotten = {**second, "carry": None}
        await worker.stop()
        await worker.call("train", **forgotten)
        assert (tmp_path / "two").read_bytes() != undisturbed

    with_worker(tmp_path, use)


def test_a_task_that_cannot_be_built_is_explained_to_the_daemon(tmp_path: Path) -> None:
    """test_task covers every mistake; this one shows that the texts cross the pipe."""

    async def use(worker: WorkerProcess) -> None:
        with pytest.raises(ConfigError, match="has no `bild`") as caught:
            await worker.open()
        assert caught.value.hint == "check `task.entry` in node.yaml"

    with_worker(tmp_path, use, entry="hospital:bild")


@pytest.mark.parametrize(
    ("mode", "error", "words"),
    [
        ("raise", TaskFailed, r"^RuntimeError \(hospital.py:\d+\)$"),
        ("die", WorkerDied, "SIGKILL"),
        ("full", DiskFull, "No space left on device"),
        ("files", TooManyFiles, "Too many open files in system"),
        ("broken", StoreError, "Input/output error"),
    ],
)
def test_a_failing_round_is_explained_and_another_worker_takes_over(
    tmp_path: Path, mode: str, error: type[Exception], words: str
) -> None:
    async def use(worker: WorkerProcess) -> None:
        await worker.call("initial", **initial_arguments(tmp_path))
        with pytest.raises(error, match=words) as caught:
            await worker.call("train", **train_arguments(tmp_path))
        assert type(caught.value) is error
        await worker.stop()
        await worker.call("initial", **initial_arguments(tmp_path, "again"))
        assert (tmp_path / "again").read_bytes() == (tmp_path / "base").read_bytes()

    with_worker(tmp_path, use, args={"mode": mode})


def test_the_text_of_a_task_error_is_passed_on_only_with_full_errors(tmp_path: Path) -> None:
    """The text of an exception may name a patient's file."""

    async def use(worker: WorkerProcess) -> None:
        await worker.call("initial", **initial_arguments(tmp_path))
        with pytest.raises(TaskFailed) as caught:
            await worker.call("train", **train_arguments(tmp_path))
        output.append(str(caught.value))
        await worker.stop()

    for full in (False, True):
        output: list[str] = []
        with_worker(
            tmp_path, use, args={"mode": "raise"}, on_output=output.append, full_errors=full
        )
        assert any("the user's own words site-a 3" in line for line in output)
        assert any("no such image" in line for line in output) is full
        assert any("Traceback" in line for line in output) is full
        assert re.search(r"RuntimeError.*\(hospital.py:12\)$", output[-1])


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("pair", r"^entry '1' of the model's output is str, not a tensor$"),
        # Raised below the same function of ours, and by the same words: the class decides.
        ("foreign", r"^ValueError \(hospital.py:\d+\)$"),
    ],
)
def test_our_own_error_texts_about_a_task_are_always_passed_on(
    tmp_path: Path, mode: str, words: str
) -> None:
    async def use(worker: WorkerProcess) -> None:
        with pytest.raises(TaskFailed, match=words):
            await worker.call("initial", **initial_arguments(tmp_path))

    with_worker(tmp_path, use, args={"mode": mode})


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux counts this memory")
@pytest.mark.parametrize(
    ("mode", "error", "words"),
    [
        ("greedy", TaskFailed, "no memory left: RuntimeError"),
        ("greedy python", TaskFailed, "no memory left: MemoryError"),
        ("die", WorkerDied, "SIGKILL, perhaps out of memory"),
    ],
)
def test_a_worker_at_its_memory_limit_reports_it(
    tmp_path: Path, mode: str, error: type[Exception], words: str
) -> None:
    async def use(worker: WorkerProcess) -> None:
        await worker.call("initial", **initial_arguments(tmp_path))
        with pytest.raises(error, match=words) as caught:
            await worker.call("train", **train_arguments(tmp_path))
        assert "`worker.memory_max` in node.yaml is 1.0 GiB, raise it" in str(caught.value)

    with_worker(tmp_path, use, args={"mode": mode}, memory_max=1 << 30)


def test_the_last_output_of_a_dying_worker_is_forwarded(tmp_path: Path) -> None:
    output: list[str] = []

    async def use(worker: WorkerProcess) -> None:
        await worker.call("initial", **initial_arguments(tmp_path))
        with pytest.raises(WorkerDied):
            await worker.call("train", **train_arguments(tmp_path))

    with_worker(tmp_path, use, args={"mode": "die"}, on_output=output.append)
    assert any("the user's own words" in line for line in output)


def test_a_silent_worker_is_killed(tmp_path: Path) -> None:
    async def use(worker: WorkerProcess) -> None:
        await worker.call("initial", **initial_arguments(tmp_path))
        pid = worker.pid
        assert pid is not None
        with pytest.raises(WorkerSilent, match="said nothing for 1 s"):
            await worker.call("train", silence_s=1.0, **train_arguments(tmp_path))
        assert not psutil.pid_exists(pid)

    with_worker(tmp_path, use, args={"mode": "hang"})


def ended(process: psutil.Process) -> bool:
    """Whether a process has ended; one that its new parent has not reaped is a zombie."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


DAEMON = """
import asyncio, json, sys
from lightyear_node.node.worker_process import WorkerProcess

async def main():
    first, *jobs = json.loads(sys.argv[1])
    worker = WorkerProcess(first["opening"], silence_s=600.0)
    for job in jobs:
        await worker.call(**job)

asyncio.run(main())
"""


def test_a_worker_does_not_outlive_its_daemon(tmp_path: Path) -> None:
    """Whatever it is doing: its standard input closes when the daemon dies."""
    (tmp_path / "hospital.py").write_text(TASK)
    mark = tmp_path / "mark"
    jobs = [
        {"opening": opening(args={"mode": "hang", "mark": str(mark)})},
        {"job": "initial", **initial_arguments(tmp_path)},
        {"job": "train", **train_arguments(tmp_path)},
    ]
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, json.dumps(jobs)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    try:
        wait_until(lambda: mark.exists() or daemon.poll() is not None, "the worker to train")
        [worker] = psutil.Process(daemon.pid).children()
    finally:
        daemon.kill()
        daemon.wait()
    wait_until(lambda: ended(worker), "the worker to end")


def test_cancelling_a_job_ends_the_child(tmp_path: Path) -> None:
    async def use(worker: WorkerProcess) -> None:
        await worker.call("initial", **initial_arguments(tmp_path))
        pid = worker.pid
        assert pid is not None
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await worker.call("train", **train_arguments(tmp_path))
        assert not psutil.pid_exists(pid)

    with_worker(tmp_path, use, args={"mode": "hang"})


def test_the_daemon_receives_the_update_layout(tmp_path: Path) -> None:
    """Through a file, since a header may exceed the size of an answer."""

    async def use(worker: WorkerProcess) -> None:
        answer = await worker.call("initial", **initial_arguments(tmp_path))
        arguments = train_arguments(tmp_path)
        assert (await worker.call("train", **arguments))["clamped"] == 0
        header, sent = (tmp_path / "header").read_bytes(), (tmp_path / "outgoing").read_bytes()
        assert sent.startswith(header)
        assert answer == {"wire_raw_bytes": len(sent)}
        base, own = (tmp_path / "base").read_bytes(), (tmp_path / "own").read_bytes()
        assert b'"F32"' in base
        assert b'"BF16"' in header
        assert len(base) == len(own) > len(sent)

    with_worker(tmp_path, use, exchange={"dtype": "bfloat16"})


def test_an_exchange_pattern_that_matches_no_tensor_is_a_config_error(tmp_path: Path) -> None:
    async def use(worker: WorkerProcess) -> None:
        with pytest.raises(ConfigError, match=r"exchange.include.*haed") as caught:
            await worker.open()
        assert "0.weight" in str(caught.value.hint)

    with_worker(tmp_path, use, exchange={"include": ["haed.*"]})
