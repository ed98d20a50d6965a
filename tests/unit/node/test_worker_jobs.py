"""A peer's file that kills or hangs the worker costs only that peer; with real workers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lightyear_node.errors import WorkerError
from lightyear_node.learning import Layout, Weights, write
from lightyear_node.node import worker_jobs as module
from lightyear_node.node.worker_jobs import WorkerJobs
from lightyear_node.node.worker_process import WorkerProcess
from lightyear_node.storage.state_directory import StateDirectory
from lightyear_node.types import Digest, PeerName, Reason, Round, Verdict
from tests.unit.node.test_worker_process import opening

TASK = """
import os, signal, time
import torch
from torch import nn
from torch.nn import functional
from lightyear_node import Task

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
    def forward(self, x):
        mark = float(self.body.bias.detach().abs().max())
        if mark > 1e7: time.sleep(3600)
        if mark > 1e5: os.kill(os.getpid(), signal.SIGKILL)
        if mark > 1e3: raise RuntimeError("not these")
        return self.head(torch.relu(self.body(x)))

def build() -> Task:
    generator = torch.Generator().manual_seed(5)
    data = [(torch.randn(8, 4, generator=generator), torch.arange(8) % 3) for _ in range(2)]
    return Task(model=Net, loss=functional.cross_entropy,
                optimizer=lambda p: torch.optim.Adam(p, 1e-3), train_data=data, val_data=data)
"""
RAISES, DIES, HANGS = 1e4, 1e6, 1e8
B, C, D = (PeerName(f"site-{letter}") for letter in "bcd")
Peers = list[tuple[PeerName, Digest, Any]]


class Bench:
    """Worker jobs with a real worker, and stored updates."""

    def __init__(self, folder: Path, rule: dict[str, Any], silence_s: float) -> None:
        folder.mkdir()
        (folder / "fragile.py").write_text(TASK)
        path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        self.deaths: list[str] = []
        self.state = StateDirectory(folder / "state")
        self.worker = WorkerProcess(
            opening("fragile:build", rule=rule),
            silence_s=silence_s,
            environment={"PYTHONPATH": path},
        )
        self.worker_jobs = WorkerJobs(
            self.worker, self.state, lambda why, _: self.deaths.append(why)
        )

    async def begin(self) -> None:
        opened = await self.worker_jobs.open()
        self.before = opened.initial.digest
        self.work = await self.worker_jobs.train(Round(0), self.before, None)
        header = opened.header
        own = self.state.updates.path(self.work.own)
        self.layout = Layout.of(_tensors(own, header))

    def update(self, mark: float | None = None) -> Digest:
        """Our own model with all of its first bias set to one number."""
        with Weights(self.state.updates.path(self.work.own), self.layout) as own:
            tensors = {name: tensor.clone() for name, tensor in own.items()}
        tensors["head.bias"] += 1e-4 * torch.randn(3)
        if mark is not None:
            tensors["body.bias"].fill_(mark)
        scratch = self.state.updates.scratch_path()
        write(scratch, self.layout, tensors)
        return self.state.updates.adopt(scratch).digest

    async def judge(self, peers: Sequence[tuple[PeerName, Digest]]) -> dict[PeerName, Verdict]:
        asked = [(peer, digest, 1) for peer, digest in peers]
        verdicts, _ = await self.worker_jobs.judge(Round(0), self.work, self.before, asked, {})
        assert len(verdicts) == len(peers)
        return {verdict.peer: verdict for verdict in verdicts}


def _tensors(path: Path, header: bytes) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    assert path.read_bytes().startswith(header)
    return load_file(path)


Scene = Callable[[Bench], Awaitable[None]]


@pytest.fixture
def on_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr(module, "BACKOFF_S", 0.01)
    # Only the paper's method tries models that are far from ours.
    plain = {"name": "lightyear", "guard": False}

    def run(scene: Scene, *, rule: dict[str, Any] = plain, silence_s: float = 60.0) -> None:
        bench = Bench(tmp_path / "bench", rule, silence_s)

        async def play() -> None:
            try:
                await bench.begin()
                await scene(bench)
            finally:
                await bench.worker.stop()
                bench.state.close()

        asyncio.run(play())

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("mark", "restarts"), [(RAISES, 0), (DIES, 4)])
def test_a_file_that_kills_the_worker_gets_its_own_verdict(
    on_bench: Callable[..., None], mark: float, restarts: int
) -> None:
    async def scene(bench: Bench) -> None:
        peers = [(B, bench.update()), (C, bench.update(mark)), (D, bench.update())]
        verdicts = await bench.judge(peers)
        assert (verdicts[C].accepted, verdicts[C].reason) == (False, Reason.MALFORMED)
        assert verdicts[B].accepted
        assert verdicts[D].accepted
        assert len(bench.deaths) == restarts
        again = await bench.judge(peers)
        assert {peer: verdict.reason for peer, verdict in again.items()} == {
            peer: verdict.reason for peer, verdict in verdicts.items()
        }
        assert len(bench.deaths) == restarts, "a file that has ended one worker is not tried again"

    on_bench(scene)


@pytest.mark.slow
def test_a_file_that_hangs_the_worker_gets_its_own_verdict(
    on_bench: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "JUDGING_SILENCE_S_MIN", 3.0)

    async def scene(bench: Bench) -> None:
        good = [(B, bench.update()), (D, bench.update())]
        assert all(verdict.accepted for verdict in (await bench.judge(good)).values())
        verdicts = await bench.judge([*good, (C, bench.update(HANGS))])
        assert verdicts[C].reason is Reason.MALFORMED
        assert verdicts[B].accepted
        assert verdicts[D].accepted
        assert bench.deaths == ["silent"] * 2

    # Much longer than judging took before: the hang is noticed by that.
    on_bench(scene, silence_s=300.0)


@pytest.mark.slow
def test_a_file_that_cannot_be_merged_is_left_out(on_bench: Callable[..., None]) -> None:
    """Also if the file went bad after the decision: the round ends with the other updates."""

    async def scene(bench: Bench) -> None:
        good, bad = bench.update(), bench.update()
        alone = await bench.worker_jobs.merge(Round(0), bench.work, [(B, good, 0.3)])
        assert alone.left_out == ()
        path = bench.state.updates.path(bad)
        path.write_bytes(path.read_bytes()[:-4])
        merged = await bench.worker_jobs.merge(
            Round(0), bench.work, [(B, good, 0.3), (C, bad, 0.3)]
        )
        assert merged.left_out == (C,)
        assert merged.model == alone.model

    on_bench(scene)


@pytest.mark.slow
def test_our_own_failure_blames_no_peer(on_bench: Callable[..., None]) -> None:
    async def scene(bench: Bench) -> None:
        peers = [(B, bench.update()), (C, bench.update())]
        own = bench.state.updates.path(bench.work.own)
        intact = own.read_bytes()
        own.write_bytes(b"")
        with pytest.raises(WorkerError):
            await bench.judge(peers)
        own.write_bytes(intact)
        assert all(verdict.accepted for verdict in (await bench.judge(peers)).values())

    on_bench(scene)
