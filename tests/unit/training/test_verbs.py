"""Training scripts in a real worker process, driven by the jobs that a daemon sends."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load, load_file

from lightyear_node.errors import WorkerDied
from lightyear_node.node.worker_process import WorkerProcess
from tests.support.script_worker import LOOP, SCRIPT, Rounds, digest, run_alone, run_worker

ROUNDS = 3


def trained(folder: Path, **options: Any) -> list[tuple[str, str]]:
    """Digests of each round's own and merged model; every merge includes the first update."""
    found: list[tuple[str, str]] = []

    async def use(worker: WorkerProcess) -> None:
        rounds = Rounds(worker, folder)
        await rounds.begin()
        first: Path | None = None
        for _ in range(ROUNDS):
            await rounds.train()
            await rounds.judge()
            own, first = rounds.path("own"), first or rounds.update
            await rounds.merge(peer=first)
            found.append((digest(own), digest(rounds.model)))

    run_worker(folder, use, **options)
    assert len({own for own, _ in found}) == ROUNDS
    return found


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"rule": {"name": "fedprox", "options": {"mu": 0.5}}, "exchange": {"dtype": "bfloat16"}},
        {"exchange": {"exclude": ["4.*"]}},
    ],
    ids=["lightyear", "fedprox", "own head"],
)
def test_a_script_gives_the_same_bytes_as_the_equivalent_task(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    as_task = trained(tmp_path / "task", **changed)
    as_script = trained(tmp_path / "script", script=SCRIPT, **changed)
    assert as_script == as_task


STATEFUL = """
from parts import *
import random, signal, sys, os, pathlib
from collections import Counter
import numpy
import lightyear_node.training as ly

model = ly.init(net, val_data=loaders()[1], loss=F.cross_entropy)
train, _ = loaders()
model.train()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3, 3], 0.5)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
scaler = torch.amp.GradScaler("cpu")
progress = {"epoch": 0, "seen": Counter()}
ly.state(optimizer, scheduler, plateau, scaler=scaler, progress=progress)
while ly.running():
    ly.receive(model)
    assert model.training
    progress["epoch"] += 1
    noise = random.random() + numpy.random.rand()
    for step, (x, y) in enumerate(train):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x + 0.01 * noise), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        progress["seen"].update(y.tolist())
        if step == 2 and sys.argv[1:] == [str(progress["epoch"])] and not os.path.exists("died"):
            pathlib.Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    scheduler.step()
    plateau.step(loss.item())
    numbers = {"epoch": progress["epoch"], "lr": scheduler.get_last_lr()[0], "noise": noise}
    numbers["zeros"] = progress["seen"][0]
    ly.send(model, metrics=numbers, samples=80 + progress["epoch"])
    model(x)  # changes the statistics of BatchNorm, which must not matter
"""


def test_a_round_that_is_killed_is_trained_again_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optimizer, schedulers, GradScaler and the script's own values continue in a new process."""
    monkeypatch.chdir(tmp_path)
    digests: dict[str, list[str]] = {"undisturbed": [], "killed": []}
    answers: dict[str, list[Any]] = {"undisturbed": [], "killed": []}

    def rounds_of(name: str) -> None:
        async def use(worker: WorkerProcess) -> None:
            rounds = Rounds(worker, tmp_path / name)
            await rounds.begin()
            for _ in range(4):
                try:
                    answers[name].append(await rounds.train())
                except WorkerDied:
                    assert name == "killed"
                    answers[name].append(await rounds.train())
                await rounds.judge()
                digests[name].append(digest(rounds.path("own")))
                await rounds.merge()

        args = ["3"] if name == "killed" else []
        run_worker(tmp_path / name, use, script=STATEFUL, args=args)

    rounds_of("undisturbed")
    rounds_of("killed")
    assert (tmp_path / "died").exists()
    assert digests["killed"] == digests["undisturbed"]
    assert answers["killed"] == answers["undisturbed"]
    assert [one["samples"] for one in answers["killed"]] == [81, 82, 83, 84]
    assert [one["metrics"]["epoch"] for one in answers["killed"]] == [1, 2, 3, 4]
    assert [one["metrics"]["lr"] for one in answers["killed"]] == [0.1, 0.05, 0.0125, 0.0125]
    assert len({one["metrics"]["noise"] for one in answers["killed"]}) == 4


def test_a_new_worker_knows_the_sample_count_when_it_judges(tmp_path: Path) -> None:
    """Under FedAvg the shares follow from the samples, ours from the training state."""
    script = SCRIPT.replace(", samples=80", "").replace("send(model)", "send(model, samples=240)")
    weights = []

    async def use(worker: WorkerProcess) -> None:
        rounds = Rounds(worker, tmp_path)
        await rounds.begin()
        await rounds.train()
        for _ in range(2):
            [verdict] = (await rounds.judge())["verdicts"]
            weights.append(verdict["weight"])
            await worker.stop()

    run_worker(tmp_path, use, script=script, rule={"name": "fedavg"})
    assert weights == [0.25, 0.25]


@pytest.mark.slow
def test_steps_are_counted_as_progress_and_expected_again(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    script = SCRIPT.replace("optimizer.step()", "optimizer.step(); time.sleep(0.25)")

    async def use(worker: WorkerProcess) -> None:
        rounds = Rounds(worker, tmp_path)
        await rounds.begin()
        for _ in range(2):
            await rounds.train()
            await rounds.merge()
            await worker.stop()

    def on_progress(job: str, done: int, total: int) -> None:
        if job == "train":
            seen.append((done, total))

    run_worker(tmp_path, use, script="import time\n" + script, on_progress=on_progress)
    first = [(done, done) for done in range(1, 6)]
    assert seen == [*first, *((done, 5) for done in range(1, 6))]


def test_a_script_reports_its_own_units_of_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    script = SCRIPT.replace(LOOP, LOOP + "    ly.progress(7, 70)\n")

    async def use(worker: WorkerProcess) -> None:
        rounds = Rounds(worker, tmp_path)
        await rounds.begin()
        await rounds.train()

    run_worker(tmp_path, use, script=script, on_progress=lambda job, *told: seen.append(told))
    assert seen == [(7, 70)]


def test_a_stopped_script_runs_its_last_lines_with_the_merged_model(tmp_path: Path) -> None:
    after = """
from safetensors.torch import save_file
save_file({k: v for k, v in model.state_dict().items() if v.is_floating_point()}, "final")
assert not ly.running()
print("the script has said goodbye")
"""
    said: list[str] = []
    script = SCRIPT + after.replace('"final"', repr(str(tmp_path / "final")))

    async def use(worker: WorkerProcess) -> None:
        rounds = Rounds(worker, tmp_path)
        await rounds.begin()
        await worker.stop()  # as `check` does: nothing is trained yet
        assert not (tmp_path / "final").exists()
        await rounds.train()
        await rounds.merge(peer=rounds.update)
        await worker.stop()
        merged = (tmp_path / "model-1").read_bytes()
        assert load_file(tmp_path / "final").keys() == load(merged).keys()
        for name, tensor in load(merged).items():
            assert tensor.equal(load_file(tmp_path / "final")[name])

    run_worker(tmp_path, use, script=script, on_output=said.append)
    assert said == ["the script has said goodbye"]


def test_sigterm_during_training_ends_the_worker(tmp_path: Path) -> None:
    mark = tmp_path / "training"
    script = SCRIPT.replace(LOOP, LOOP + f"    open({str(mark)!r}, 'w').close(); time.sleep(600)\n")

    async def use(worker: WorkerProcess) -> None:
        rounds = Rounds(worker, tmp_path)
        await rounds.begin()

        async def stop() -> None:
            while not mark.exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.05)
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGTERM)

        async with asyncio.TaskGroup() as group:
            group.create_task(stop())
            with pytest.raises(WorkerDied, match="SIGTERM"):
                await rounds.train()

    run_worker(tmp_path, use, script="import time\n" + script + "print('after the loop')")


def test_a_script_runs_alone_for_one_round(tmp_path: Path) -> None:
    assert run_alone(tmp_path, SCRIPT + "print('rounds: done')") == "rounds: done\n"
