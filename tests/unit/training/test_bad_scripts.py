"""Scripts that break a rule: each gets a sentence that names it, and the worker goes on serving."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import psutil
import pytest
import torch

from lightyear_node.errors import ConfigError, InvalidTask, TaskFailed, WorkerDied, WorkerSilent
from lightyear_node.node.worker_process import WorkerProcess
from lightyear_node.training.standalone import StandaloneSession
from lightyear_node.worker.script_state import ScriptState
from tests.support.script_worker import LOOP, SCRIPT, Rounds, run_here, run_worker

BODY = "    for x, y in train:"
SEND = "    ly.send(model)"


@pytest.mark.parametrize(
    ("replaced", "by", "words"),
    [
        ("    ly.receive(model)", "", "^round 0: `send` was called without `receive`$"),
        (SEND, SEND + "\n" + SEND, "^round 0: `send` was called twice$"),
        (SEND, "", "^round 0: `running` was called again without `send`$"),
        (LOOP, LOOP + "    ly.receive(model)\n", "^round 0: `receive` was called twice$"),
        (LOOP, LOOP + "    continue\n", "^round 0: `running` was called again without `send`$"),
        (
            SEND,
            "    model[4] = nn.Linear(16, 4)\n" + SEND,
            r"^the model has changed since `init`: tensor 4.bias was \(3,\) and is \(4,\)$",
        ),
        (
            SEND,
            "    model.append(nn.Linear(3, 3))\n" + SEND,
            "^the model has changed since `init`: tensor 5.bias is new$",
        ),
        (
            SEND,
            "    ly.send(nn.Sequential(*model[:4]))",
            "^the model has changed since `init`: tensor 4.bias is missing$",
        ),
        (SEND, "    ly.send(optimizer)", "^the model is a Adam, not a torch.nn.Module$"),
        (
            SEND,
            "    ly.send(model, metrics={'dice': 'good'})",
            "^`send`: the metric dice is a str, not a number$",
        ),
        (SEND, "    ly.send(model, samples=-3)", "^`send`: samples is -3, not a number of samples"),
        (SEND, "    ly.send(model, samples=0.5)", "^`send`: samples is 0.5, not a number of"),
        (
            "ly.state(optimizer)",
            "ly.state(optimizer, progress={'best': {'net': model}})",
            "^`state`: progress.best.net is a Sequential, which cannot be saved$",
        ),
        (SEND, "    import sys; sys.exit(0)", "^the script ended in round 0, before `send`$"),
        (SEND, "    break", "^the script ended in round 0, before `send`$"),
        (SEND, "    import sys; sys.exit(3)", "ended with exit code 3 in round 0, before `send`$"),
        (SEND, "    raise ValueError('patient-7.dcm')", r"^ValueError \(train.py:\d+\)$"),
        (SEND, SEND + "\n    break", "^the script ended after round 0, before the last round of"),
        (SEND, SEND + "\n    raise KeyError('patient-7')", r"^KeyError \(train.py:\d+\)$"),
        (
            SEND,
            "    import threading; box = []\n"
            "    def other():\n"
            "        try: ly.send(model)\n"
            "        except Exception as problem: box.append(problem)\n"
            "    thread = threading.Thread(target=other); thread.start(); thread.join()\n"
            "    raise box[0]",
            "^`send` was called in another thread$",
        ),
        (
            SEND,
            "    for parameter in model.parameters(): parameter.data.fill_(float('nan'))\n" + SEND,
            "^round 0: training ended in weights that are not finite numbers$",
        ),
    ],
)
def test_a_broken_rule_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: str, by: str, words: str
) -> None:
    assert SCRIPT.count(replaced) == 1
    answers = run_here(tmp_path, SCRIPT.replace(replaced, by), monkeypatch)
    failed = [answer for answer in answers if "error" in answer]
    assert failed
    assert re.search(words, failed[0]["message"])
    assert failed[0]["error"] == "task"
    assert failed[0]["hint"]
    served = [answer for answer in answers if answer["id"] < failed[0]["id"]]
    assert all("ok" in answer for answer in served)


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        ("print('nothing to do')", "task", "^the script ended without `init`$"),
        ("import sys; sys.exit(3)", "task", "^the script ended with exit code 3 without `init`$"),
        (
            SCRIPT.replace("ly.init", "ly.running()\nly.init"),
            "task",
            "^`running` was called before `init`$",
        ),
        ("this is no python", "config", "^task.script: train.py:1: invalid syntax$"),
        (
            SCRIPT.replace("ly.state(optimizer)", "ly.state(3)"),
            "task",
            r"^`state`: object 0 \(int\) has no state_dict and load_state_dict$",
        ),
        (
            SCRIPT.replace("ly.state(optimizer)", "ly.init(model, val_data=val, loss=0)"),
            "task",
            "^`init` was called twice$",
        ),
    ],
    ids=["no init", "exit 3", "order", "syntax", "state", "init twice"],
)
def test_a_script_that_cannot_begin_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, kind: str, words: str
) -> None:
    failed = [one for one in run_here(tmp_path, script, monkeypatch) if "error" in one]
    assert failed[0]["error"] == kind
    assert any(re.search(words, one["message"]) for one in failed)


def test_a_rule_with_a_personal_model_needs_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_here(tmp_path, SCRIPT, monkeypatch, rule={"name": "ditto"})[0]
    assert "trains a second, personal model, which a script cannot" in first["message"]


def test_a_shadow_needs_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_here(tmp_path, SCRIPT, monkeypatch, rule={"shadow": True})[0]
    assert "`rule.shadow` trains a second model, which a script cannot" in first["message"]


def test_state_that_no_longer_fits_is_named() -> None:
    """The script was changed between two rounds."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    before, after = ScriptState(), ScriptState()
    before.add(torch.optim.Adam(parameters), progress={"epoch": 3})
    kept = {"epoch": 0}
    after.add(torch.optim.Adam(parameters[:1]), progress=kept)
    with pytest.raises(InvalidTask, match=r"object 0 \(Adam\) does not accept its state of"):
        after.load_state_dict(before.state_dict())


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    async def use(worker: WorkerProcess) -> None:
        (tmp_path / "train.py").unlink()
        with pytest.raises(ConfigError, match=r"task.script: there is no file .*train.py"):
            await worker.open()

    run_worker(tmp_path, use, script="")


def test_a_script_that_hangs_is_killed(tmp_path: Path) -> None:
    script = SCRIPT.replace(SEND, "    import time; time.sleep(3600)")

    async def use(worker: WorkerProcess) -> None:
        rounds = Rounds(worker, tmp_path)
        await rounds.begin()  # which may take longer
        with pytest.raises(WorkerSilent, match="said nothing for 2 s"):
            await rounds.train(silence_s=2.0)

    run_worker(tmp_path, use, script=script)


def test_a_script_that_has_ended_still_judges_and_merges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = run_here(tmp_path, SCRIPT.replace(SEND, SEND + "\n    break"), monkeypatch)
    opened, initial, trained, merged, refused, _ = answers
    assert all("ok" in one for one in (opened, initial, trained, merged))
    assert refused["message"].startswith("the script ended after round 0")


def test_a_forked_process_neither_answers_nor_keeps_the_pipe(tmp_path: Path) -> None:
    """The worker dies while its child lives: the daemon notices at once, not after `silence`."""
    said: list[str] = []
    forks = f"""
    import os, signal, time
    if os.fork() == 0:
        try:
            ly.send(model)
        except Exception as problem:
            print("in the child:", problem, flush=True)
        open({str(tmp_path / "child")!r}, "w").write(str(os.getpid()))
        time.sleep(600)
    while not os.path.exists({str(tmp_path / "child")!r}):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    script = SCRIPT.replace(LOOP, LOOP + forks)

    async def use(worker: WorkerProcess) -> None:
        rounds = Rounds(worker, tmp_path)
        await rounds.begin()
        with pytest.raises(WorkerDied, match="SIGKILL"):
            await rounds.train()
        psutil.Process(int((tmp_path / "child").read_text())).kill()
        await asyncio.sleep(0.5)  # so that the event loop closes the child's output

    run_worker(tmp_path, use, script=script, silence_s=600.0, on_output=said.append)
    assert "in the child: `send` was called in a process that the script has forked" in said


def test_a_forked_process_takes_no_jobs_when_its_part_of_the_script_ends(tmp_path: Path) -> None:
    said: list[str] = []
    forks = """
    import os
    child = os.fork()
    if child == 0:
        ly.send(model)
    assert os.waitpid(child, 0)[1] != 0
"""

    async def use(worker: WorkerProcess) -> None:
        rounds = Rounds(worker, tmp_path)
        await rounds.begin()
        for _ in range(2):
            await rounds.train()
            await rounds.merge()

    run_worker(tmp_path, use, script=SCRIPT.replace(LOOP, LOOP + forks), on_output=said.append)
    assert [line for line in said if "this ended a process that the script has forked" in line]


def test_a_data_loader_with_processes_works(tmp_path: Path) -> None:
    async def use(worker: WorkerProcess) -> None:
        rounds = Rounds(worker, tmp_path)
        await rounds.begin()
        await rounds.train()

    script = SCRIPT.replace(
        BODY, "    for x, y in DataLoader(train.dataset, 16, shuffle=True, num_workers=2):"
    )
    run_worker(tmp_path, use, script=script)


def test_a_flood_of_output_is_limited(tmp_path: Path) -> None:
    """50 MB in lines, and 50 MB without a line break, use little memory of the daemon."""
    said: list[str] = []
    prints = """
    for _ in range(500):
        print("x" * 99 + "\\n" + ("y" * 99 + "\\n") * 999, end="")
    for _ in range(500):
        print("z" * 100_000, end="")
    print()
"""
    before = psutil.Process().memory_info().rss
    peak: list[int] = []

    def on_output(line: str) -> None:
        said.append(line)
        peak.append(psutil.Process().memory_info().rss)

    async def use(worker: WorkerProcess) -> None:
        rounds = Rounds(worker, tmp_path)
        await rounds.begin()
        await rounds.train()

    run_worker(tmp_path, use, script=SCRIPT.replace(LOOP, LOOP + prints), on_output=on_output)
    assert len(said) < 2000
    assert max(map(len, said)) < 600
    assert max(peak) - before < 20 << 20


def test_a_script_that_reads_standard_input_gets_nothing(tmp_path: Path) -> None:
    """It must not take jobs from the pipe."""

    async def use(worker: WorkerProcess) -> None:
        rounds = Rounds(worker, tmp_path)
        await rounds.begin()
        await rounds.train()

    run_worker(tmp_path, use, script="import sys\nassert sys.stdin.read() == ''\n" + SCRIPT)


def test_a_mistake_is_found_without_a_node_too() -> None:
    session, model = StandaloneSession(), torch.nn.Linear(2, 2)
    with pytest.raises(TaskFailed, match="`running` was called before `init`"):
        session.running()
    session.init(model)
    assert session.running()
    with pytest.raises(TaskFailed, match="`send` was called without `receive`"):
        session.send(model)
    session.receive(model)
    with pytest.raises(InvalidTask, match="metric dice is a list"):
        session.send(model, metrics={"dice": [1, 2]})
    with pytest.raises(InvalidTask, match="tensor bias was"):
        session.send(torch.nn.Linear(2, 3))
    session.send(model)
    assert not session.running()
