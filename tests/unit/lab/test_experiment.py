"""Experiments with real child processes, on the smallest digits task."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from lightyear_node.cli import main
from lightyear_node.errors import AlreadyRunning, ConfigError
from lightyear_node.lab import experiment, experiment_report
from lightyear_node.lab.experiment import ExperimentOptions, run
from lightyear_node.lab.federation import LabError
from lightyear_node.lab.jobs import AcceptanceJob, expand, failed_row
from lightyear_node.lab.live_view import (
    ChildSlot,
    RunProgress,
    StepCosts,
    render_progress,
    show_progress,
)
from lightyear_node.lab.result_folder import ResultFolder, read_lines
from lightyear_node.lab.suite import AcceptanceBlock, load_suite
from tests.support.paths import ROOT

pytest.importorskip("sklearn")

DEADLINE_S = 60.0
GRID: dict[str, Any] = {
    "name": "main",
    "task": "digits",
    "args": {"epochs": 1, "batch_size": 64},
    "clients": 3,
    "rounds": 1,
    "rules": ["local", "fedavg"],
}
OWN_TASK = """
import os, signal
from lightyear_node.lab.tasks import digits

def build(site_index, site_count, seed):
    print("tasks may print")
    if seed == 1:
        raise ValueError("no images in " + os.environ["LIGHTYEAR_DATA"])
    if seed == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return digits.build(site_index, site_count, seed, epochs=1, batch_size=64)
"""
GATED_TASK = """
import time
from pathlib import Path
from lightyear_node.lab.tasks import digits

def build(site_index, site_count, seed):
    results = Path("out/results.jsonl")
    while Path("closed").exists() and results.exists() and results.read_text():
        time.sleep(0.01)
    return digits.build(site_index, site_count, seed, epochs=1, batch_size=64)
"""
"""While the file `closed` exists, its second job does not begin."""
SUITE, OUT = Path("suite.yaml"), Path("out")
RESULTS = OUT / "results.jsonl"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    monkeypatch.delenv("LIGHTYEAR_DATA", raising=False)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # what users have
    Path("scratch").mkdir()


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders for which a report was requested; drawing has its own tests."""
    folders: list[Path] = []

    def note(directory: Path) -> Path:
        folders.append(directory)
        return directory / "report.html"

    monkeypatch.setattr(experiment_report, "write_report", note)
    return folders


def write_suite(*grids: dict[str, Any], **more: object) -> None:
    SUITE.write_text(json.dumps({"name": "tiny", "grids": grids or [GRID], **more}))


def command(*words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the command line in this process; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["lightyear-node", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "lightyear_node", "experiment", str(SUITE), "--out", "out", *words],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_restore_signals,
    )


def _restore_signals() -> None:
    """The test run may ignore signals, as under `nohup`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def children_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children()


def wait_until(condition: Callable[[], Any]) -> Any:
    """Return the first true value of the condition."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError("the condition was not met")


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGHUP)),
    ],
)
def test_an_interrupted_run_leaves_no_process_and_prints_how_to_continue(
    number: signal.Signals,
) -> None:
    # Long enough to be interrupted.
    write_suite(GRID | {"rounds": 100_000})
    with start("--jobs", "2") as process:
        try:
            children = wait_until(lambda: both if len(both := children_of(process)) == 2 else None)
            process.send_signal(number)
            _, text = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "0 of 2 jobs are finished and kept" in text
    assert "lightyear-node experiment suite.yaml --out out --resume" in text
    assert "Traceback" not in text
    assert not any(child.is_running() for child in children)
    assert list(Path("scratch").iterdir()) == []
    assert json.loads((OUT / "manifest.json").read_text())["finished"] is None


def test_a_killed_run_with_a_torn_line_can_be_resumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The results equal those of an uninterrupted run, without repetitions."""
    Path("gated_task.py").write_text(GATED_TASK)
    Path("closed").touch()
    grid = GRID | {"task": "gated_task:build", "args": {}, "metric": "accuracy"}
    write_suite(grid)
    with start("--jobs", "1", "--no-view") as process:
        wait_until(lambda: RESULTS.exists() and RESULTS.read_text().endswith("\n"))
        # The folder is locked.
        with pytest.raises(AlreadyRunning):
            ResultFolder(OUT)
        orphans = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        for orphan in orphans:
            orphan.kill()
    Path("closed").unlink()
    [first] = read_lines(RESULTS)
    local, fedavg = expand(load_suite(SUITE))
    assert (first["key"], first["label"]) == (local.key, "local")
    # Without --resume the folder is refused.
    assert command("experiment", "suite.yaml", "--out", "out", monkeypatch=monkeypatch) == 78
    # Another job has failed, and a power cut has truncated the next line.
    with RESULTS.open("a") as file:
        file.write(json.dumps(failed_row("tiny", fedavg, "no luck")) + '\n{"schema_ver')
    # The suite has changed: another label, and a second grid with the same work.
    rules = ["local", {"name": "fedavg", "label": "averaged"}]
    write_suite(grid | {"rules": rules}, grid | {"name": "again", "rules": ["local", "fedavg"]})
    console = quiet()
    outcome = run(ExperimentOptions(suite=SUITE, out=OUT, resume=True, jobs=1), console)
    assert (outcome.total, outcome.before, outcome.failures) == (4, 2, [])
    assert "left out: 1 results that are not in this suite" in output(console)
    rows = read_lines(RESULTS)
    assert [(row["grid"], row["label"]) for row in rows] == [
        ("main", "local"),
        ("again", "local"),
        ("main", "averaged"),
        ("again", "fedavg"),
    ]
    assert rows[0] == first
    assert rows[2]["sites"] == rows[3]["sites"] != first["sites"]
    assert "averaged" in (OUT / "table.md").read_text()
    assert outcome.page is not None
    assert outcome.page.exists()
    check_manifest(json.loads((OUT / "manifest.json").read_text()))


def check_manifest(manifest: dict[str, Any]) -> None:
    assert manifest["suite_text"] == SUITE.read_text()
    assert (manifest["jobs"], manifest["seeds"], manifest["cores"]) == (4, [0], 1)
    assert manifest["threads_per_job"] == 1
    assert manifest["commit"] is None or re.fullmatch("[0-9a-f]{40,64}[+]?", manifest["commit"])
    assert manifest["finished"] >= manifest["started"]
    assert manifest["versions"].keys() >= {"python", "torch", "numpy", "lightyear-node"}
    everything = json.dumps(manifest)
    assert platform.node() not in everything
    assert str(Path.cwd()) not in everything


def test_a_failed_job_is_recorded_and_the_others_are_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reported: list[Path]
) -> None:
    Path("own_task.py").write_text(OWN_TASK)
    Path("images").mkdir()
    own = {"task": "own_task:build", "args": {}, "metric": "accuracy", "seeds": [1, 2, 0]}
    write_suite(GRID | own | {"rules": ["local"]})
    words = ("experiment", "suite.yaml", "--out", "out", "--data", "images", "--format", "json")
    assert command(*words, monkeypatch=monkeypatch) == 1
    shown = capsys.readouterr()
    data = json.loads(shown.out)["data"]
    assert data["jobs"] == {"total": 3, "finished": 1, "finished_before": 0, "failed": 2}
    by_seed = {row["seed"]: row for row in read_lines(RESULTS)}
    assert "no images in DATA" in by_seed[1]["failed"]
    assert by_seed[2]["failed"] == "the process was killed by SIGKILL: tasks may print"
    assert len(by_seed[0]["sites"]) == 3
    assert {one["message"] for one in data["failed"]} == {
        by_seed[seed]["failed"] for seed in (1, 2)
    }
    assert str(Path.cwd()) not in RESULTS.read_text()
    assert reported == [OUT]
    assert [(one["label"], one["seeds"]) for one in data["scores"]] == [("local only", [0])]
    assert "failed: the process was killed by SIGKILL" in shown.err


def test_finished_work_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, reported: list[Path]
) -> None:
    """All results are in the folder, some under another name."""

    async def refuse(*job: object) -> None:
        raise AssertionError("nothing is left to run")

    monkeypatch.setattr(experiment.ProcessPool, "run", refuse)
    write_suite()
    invented = [
        failed_row("tiny", job, "") | {"sites": [], "seconds": 1.0}
        for job in expand(load_suite(SUITE))
    ]
    for row in invented:
        del row["failed"]
    with ResultFolder(OUT) as folder:
        folder.append(invented)
    write_suite(GRID | {"name": "renamed"})
    outcome = run(ExperimentOptions(suite=SUITE, out=OUT, resume=True), quiet())
    assert (outcome.total, outcome.before, outcome.failures) == (2, 2, [])
    assert [row["grid"] for row in read_lines(RESULTS)] == ["renamed"] * 2
    outcome = run(ExperimentOptions(suite=SUITE, out=OUT, resume=True, only="renamed"), quiet())
    assert outcome.before == 2
    with pytest.raises(ConfigError, match="no grid `rename`") as caught:
        run(ExperimentOptions(suite=SUITE, out=OUT, resume=True, only="rename"), quiet())
    assert caught.value.hint == "did you mean `renamed`?"


def test_acceptance_is_measured_once_and_kept_by_a_run_of_one_grid(
    monkeypatch: pytest.MonkeyPatch, reported: list[Path]
) -> None:
    modules: list[str] = []

    async def answer(pool: object, module: str, *more: object) -> list[Any]:
        modules.append(module.rpartition(".")[2])
        if modules[-1] == "simulation_process":
            raise LabError("no luck")
        return [[{"round": 0, "malfunction": "none", "paper": True, "guard": True}]]

    monkeypatch.setattr(experiment.ProcessPool, "run", answer)
    block = {"task": "digits", "clients": 3, "rounds": [0], "malfunctions": ["sfa"]}
    write_suite(GRID | {"rules": ["local"]}, acceptance=[block])
    for only, total in ((None, 2), ("main", 1), (None, 2)):
        options = ExperimentOptions(suite=SUITE, out=OUT, resume=True, view=False, only=only)
        outcome = run(options, quiet())
        assert outcome.total == total
        assert [message for _, message in outcome.failures] == ["no luck"]
        [row] = read_lines(OUT / "acceptance.jsonl")
        assert (row["task"], row["seed"], row["paper"]) == ("digits", 0, True)
    process = "simulation_process"
    assert modules == [process, "acceptance", process, process]
    assert reported == []


def test_jobs_use_what_others_have_trained(
    monkeypatch: pytest.MonkeyPatch, reported: list[Path]
) -> None:
    write_suite(GRID | {"rules": ["fedavg", "local"]})
    words = ("experiment", "suite.yaml", "--jobs", "1", "--no-view", "--out")
    assert command(*words, "out", monkeypatch=monkeypatch) == 0
    assert command(*words, "plain", "--no-cache", monkeypatch=monkeypatch) == 0
    rows, plain = read_lines(RESULTS), read_lines(Path("plain/results.jsonl"))
    assert [row.pop("trainings")["cached"] for row in rows] == [0, 3]
    assert [row.pop("trainings") for row in plain] == [{"total": 3, "cached": 0}] * 2
    for row in (*rows, *plain):
        del row["seconds"]
    assert rows == plain
    manifest = json.loads((OUT / "manifest.json").read_text())
    assert manifest["trainings"] == {"total": 6, "cached": 3}
    assert not (OUT / experiment.CACHE_NAME).exists()
    assert not Path("plain", experiment.CACHE_NAME).exists()


def test_what_was_trained_is_kept_until_the_suite_is_finished(
    monkeypatch: pytest.MonkeyPatch, reported: list[Path]
) -> None:
    """A resumed run uses it, and deletes it after the last job."""
    first, second = GRID | {"rules": ["local"]}, GRID | {"name": "more", "rules": ["fedavg"]}
    write_suite(first, second | {"metric": "dice"})  # which the task does not have
    words = ("experiment", "suite.yaml", "--out", "out", "--jobs", "1", "--no-view")
    assert command(*words, monkeypatch=monkeypatch) == 1
    cache = OUT / experiment.CACHE_NAME
    assert len(list(cache.iterdir())) == 3
    write_suite(first, second)
    assert command(*words, "--resume", monkeypatch=monkeypatch) == 0
    assert [row["trainings"]["cached"] for row in read_lines(RESULTS)] == [0, 3]
    manifest = json.loads((OUT / "manifest.json").read_text())
    assert manifest["trainings"] == {"total": 6, "cached": 3}
    assert not cache.exists()


def test_missing_data_is_reported_before_the_first_job() -> None:
    write_suite(GRID | {"task": "femnist", "args": {}})
    with pytest.raises(ConfigError, match="task femnist reads prepared data") as caught:
        run(ExperimentOptions(suite=SUITE, out=OUT), quiet())
    assert "--data" in str(caught.value.hint)
    Path("empty").mkdir()
    with pytest.raises(ConfigError, match=r"there is no femnist/femnist\.npz"):
        run(ExperimentOptions(suite=SUITE, out=OUT, data=Path("empty")), quiet())
    assert not OUT.exists()


def test_report_writes_the_report_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reported: list[Path]
) -> None:
    assert command("report", "somewhere", monkeypatch=monkeypatch) == 0
    assert reported == [Path("somewhere")]
    assert capsys.readouterr().out.strip() == "somewhere/report.html"


class TestLiveView:
    def some_progress(self) -> RunProgress:
        write_suite(GRID | {"malfunctions": ["none", "sfa"], "bad": [1]})
        local, clean, malfunctioning = expand(load_suite(SUITE))
        progress = RunProgress(
            "tiny", 3, [ChildSlot(clean, since=90.0, share=0.5), ChildSlot()], began=80.0
        )
        progress.costs.add(local, 10.0)
        progress.pending = [malfunctioning]
        progress.done = 1
        return progress

    def test_the_time_left_is_estimated_from_the_most_similar_jobs(self) -> None:
        progress = self.some_progress()
        # Only the cost of `local` is known: half a job of 10 s and a whole one, in two slots.
        assert progress.left_s() == pytest.approx((5 + 10) / 2)
        progress.costs.add(progress.pending[0], 30.0)  # type: ignore[arg-type]
        assert progress.left_s() == pytest.approx((15 + 30) / 2)
        assert RunProgress("tiny", 1, [ChildSlot()], pending=progress.pending).left_s() is None

    def test_costs_grow_with_rounds_and_sites(self) -> None:
        write_suite(GRID | {"rules": ["fedavg"]}, GRID | {"name": "long", "rounds": 4})
        short, *longer = expand(load_suite(SUITE))[1:]
        costs = StepCosts()
        costs.add(short, 2.0)
        assert costs.expected_s(longer[-1]) == pytest.approx(8.0)
        block = AcceptanceBlock(task="digits", clients=3, rounds=(0,))
        assert costs.expected_s(AcceptanceJob(block, 0)) is None

    def test_the_live_view_shows_every_slot(self) -> None:
        console = Console(file=io.StringIO(), width=100, force_terminal=True)
        progress = self.some_progress()
        progress.failed = 1
        console.print(render_progress(progress, now=100.0))
        for words in (
            "tiny",
            "2 of 3",
            "1 failed",
            "20 s",
            "fedavg, seed 0",
            "50 %",
            "nothing left",
        ):
            assert words in output(console)

    def test_without_a_terminal_every_finished_job_is_a_line(self) -> None:
        console, progress = quiet(), self.some_progress()
        with show_progress(console, progress) as finished:
            finished(progress.pending[0], "accuracy 0.500 (3 s)")
        [line] = output(console).splitlines()
        assert "1 of 3  main: digits, fedavg, 1 of 3 sfa, seed 0: accuracy 0.500 (3 s)" in line
        assert line.endswith("about 8 s left")
        with show_progress(console, progress, shown=False) as finished:
            finished(progress.pending[0], "")
        assert len(output(console).splitlines()) == 1


def test_children_inherit_no_settings_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lightyear_node.lab.process_pool import child_environment

    monkeypatch.setenv("LIGHTYEAR_DATA", "/elsewhere")
    assert "LIGHTYEAR_DATA" not in child_environment(None)
    given = child_environment(Path("images"))
    assert given["LIGHTYEAR_DATA"] == os.path.abspath("images")
    assert given["OMP_NUM_THREADS"] == "1"
