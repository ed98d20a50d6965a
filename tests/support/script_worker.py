"""A training script in a real worker process, and the rounds of one site that it trains.

The script and the `Task` train the same network on the same data with the same optimizer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lightyear_node.errors import WorkerDied
from lightyear_node.node.worker_process import WorkerProcess
from lightyear_node.worker.jobs import JobLoop, make_local_site
from lightyear_node.worker.pipe import JobPipe, WorkerJob
from tests.support.paths import ROOT

SETTINGS: dict[str, Any] = {
    "name": "site-a",
    "sites": ["site-a", "site-b"],
    "seed": 3,
    "rule": {"name": "lightyear"},
    "rounds": 8,
    "device": "cpu",
    "threads": 1,
    "exchange": {},
}

PARTS = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

def net():
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2),
                         nn.Linear(16, 3))

def loaders():
    draw = torch.Generator().manual_seed(11)
    x = torch.randn(120, 6, generator=draw)
    y = x[:, :3].argmax(1)
    return (DataLoader(TensorDataset(x[:80], y[:80]), 16, shuffle=True),
            DataLoader(TensorDataset(x[80:], y[80:]), 40))

def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2)
"""

TASK = """
from parts import *
from lightyear_node import Task

def build():
    train, val = loaders()
    return Task(model=net, loss=F.cross_entropy, optimizer=adam, train_data=train, val_data=val,
                samples=80)
"""

SCRIPT = """
from parts import *
import lightyear_node.training as ly

model = net()
train, val = loaders()
ly.init(model, val_data=val, loss=F.cross_entropy, samples=80)
optimizer = adam(model.parameters())
ly.state(optimizer)
while ly.running():
    ly.receive(model)
    for x, y in train:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    ly.send(model)
"""

LOOP = """
while ly.running():
    ly.receive(model)
"""
"""Where a test's script differs from `SCRIPT`."""


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Rounds:
    """The files of one site's rounds, and the jobs that a daemon would send for them."""

    def __init__(self, worker: WorkerProcess, folder: Path) -> None:
        self.worker = worker
        self.folder = folder
        self.model = folder / "model-0"
        self.carry: Path | None = None
        self.round = 0

    async def begin(self) -> None:
        await self.worker.call(
            "initial", out=str(self.model), wire_header=str(self.folder / "header")
        )

    def path(self, kind: str) -> Path:
        return self.folder / f"{kind}-{self.round}"

    async def train(self, *, silence_s: float = math.inf) -> dict[str, Any]:
        answer = await self.worker.call(
            "train",
            silence_s=silence_s,
            round=self.round,
            base=str(self.model),
            carry=str(self.carry) if self.carry else None,
            own=str(self.path("own")),
            outgoing=str(self.path("outgoing")),
            carry_out=str(self.path("carry")),
        )
        self.carry = self.path("carry")
        return answer

    @property
    def update(self) -> Path:
        """What this round sends to the peers."""
        sent = self.path("outgoing")
        return sent if sent.exists() else self.path("own")

    async def judge(self) -> dict[str, Any]:
        """Judge our own update as a peer's."""
        peer = {"peer": "site-b", "path": str(self.update), "samples": 80, "digest": "0" * 64}
        return await self.worker.call(
            "judge",
            round=self.round,
            own=str(self.path("own")),
            before=str(self.model),
            carry=str(self.carry),
            peers=[peer],
            state={},
        )

    async def merge(self, peer: Path | None = None) -> dict[str, Any]:
        """Merge with a peer's update, or alone, and go to the next round."""
        accepted = []
        if peer is not None:
            accepted = [
                {
                    "peer": "site-b",
                    "path": str(peer),
                    "samples": 80,
                    "digest": "0" * 64,
                    "weight": 0.5,
                }
            ]
        out = self.folder / f"model-{self.round + 1}"
        answer = await self.worker.call(
            "merge",
            round=self.round,
            own=str(self.path("own")),
            carry=str(self.carry),
            accepted=accepted,
            out=str(out),
        )
        self.model, self.round = out, self.round + 1
        return answer


def run_worker(
    folder: Path,
    use: Callable[[WorkerProcess], Awaitable[None]],
    *,
    script: str | None = None,
    args: Sequence[str] = (),
    on_progress: Callable[[str, int, int], None] = lambda job, done, total: None,
    on_output: Callable[[str], None] | None = None,
    silence_s: float = 120.0,
    full_errors: bool = False,
    **changed: Any,
) -> None:
    """Start a worker with this script, or with the equivalent task, and use it."""
    folder.mkdir(exist_ok=True)
    (folder / "parts.py").write_text(PARTS)
    (folder / "hospital.py").write_text(TASK)
    opening: dict[str, Any] = {**SETTINGS, "entry": "hospital:build", "args": {}, **changed}
    if script is not None:
        (folder / "train.py").write_text(script)
        del opening["entry"]
        opening |= {"script": str(folder / "train.py"), "args": list(args)}

    async def run() -> None:
        path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
        worker = WorkerProcess(
            opening,
            silence_s=silence_s,
            environment={"PYTHONPATH": path},
            on_progress=on_progress,
            on_output=on_output,
            full_errors=full_errors,
        )
        try:
            await use(worker)
        finally:
            await worker.stop()

    asyncio.run(run())


class ListedJobs(JobPipe):
    """Gives these jobs to a script in this process, then ends it; keeps the answers."""

    def __init__(self, requests: Sequence[dict[str, Any]]) -> None:
        self._full_errors = False
        self._memory_max = None
        self._requests_left = [
            {"id": number, **request} for number, request in enumerate(requests, start=1)
        ]
        self.answers: list[dict[str, Any]] = []

    def next(self) -> WorkerJob:
        if not self._requests_left:
            raise NoMoreJobs
        return WorkerJob(self, self._requests_left.pop(0))

    def write(self, answer: dict[str, Any]) -> None:
        if "progress" not in answer:
            self.answers.append(answer)


class NoMoreJobs(BaseException):
    """Ends a script that waits for a job."""


@contextlib.contextmanager
def settings_restored() -> Iterator[None]:
    """Restore the settings of torch that a worker changes."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)


def run_here(
    folder: Path, script: str, monkeypatch: pytest.MonkeyPatch, rounds: int = 2, **changed: Any
) -> list[dict[str, Any]]:
    """Run a script in this process through rounds without peers; returns the answers."""
    (folder / "parts.py").write_text(PARTS)
    (folder / "train.py").write_text(script)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.delitem(sys.modules, "parts", raising=False)

    def path(kind: str, round: int) -> str:
        return str(folder / f"{kind}-{round}")

    opening = {**SETTINGS, "script": str(folder / "train.py"), "args": [], **changed}
    requests: list[dict[str, Any]] = [{"job": "open", **opening}]
    requests += [{"job": "initial", "out": path("model", 0), "wire_header": path("header", 0)}]
    for round in range(rounds):
        own, carry = path("own", round), path("carry", round)
        training = {"base": path("model", round), "own": own, "outgoing": path("outgoing", round)}
        before = path("carry", round - 1) if round else None
        requests += [
            {"job": "train", "round": round, **training, "carry": before, "carry_out": carry},
            {
                "job": "merge",
                "round": round,
                "own": own,
                "carry": carry,
                "accepted": [],
                "out": path("model", round + 1),
            },
        ]
    pipe = ListedJobs(requests)
    loop = JobLoop(pipe, make_local_site)
    with settings_restored(), contextlib.suppress(NoMoreJobs):
        while True:
            loop.answer(loop.next())
    sys.modules.pop("parts", None)
    return pipe.answers


def killed_and_undisturbed(
    folder: Path, script: str, on_output: Callable[[str], None], rounds: int = 3
) -> list[list[tuple[str, dict[str, Any]]]]:
    """Digest and answer of each round: killed in the middle, and undisturbed, which runs first.

    The script kills itself once if its first argument names a file that does not exist.
    """

    def trained(name: str, args: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
        found = []

        async def use(worker: WorkerProcess) -> None:
            site = Rounds(worker, folder / name)
            await site.begin()
            for _ in range(rounds):
                try:
                    answer = await site.train()
                except WorkerDied:
                    answer = await site.train()
                await site.judge()
                found.append((digest(site.path("own")), answer))
                await site.merge()

        run_worker(folder / name, use, script=script, args=args, on_output=on_output)
        return found

    undisturbed = trained("undisturbed", [])
    killed = trained("killed", [str(folder / "died")])
    assert (folder / "died").exists()
    return [killed, undisturbed]


def run_alone(folder: Path, script: str) -> str:
    """Run a script without a node; returns what it prints."""
    (folder / "parts.py").write_text(PARTS)
    (folder / "train.py").write_text(script)
    ended = subprocess.run(
        [sys.executable, "train.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("no node has started this script") == 1
    return ended.stdout
