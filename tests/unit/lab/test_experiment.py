"""Experiments with real child processes on the digits task, made as small as they get."""

from __future__ import annotations

import io
import json
import os
import platform
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
from lightyear_node.lab import experiment, publish
from lightyear_node.lab.experiment import Options, run
from lightyear_node.lab.federation import LabError
from lightyear_node.lab.jobs import AcceptanceJob, expand, failed_row
from lightyear_node.lab.lanes import Board, Costs, Lane, picture, showing
from lightyear_node.lab.result_file import Folder, read_lines
from lightyear_node.lab.suite import AcceptanceBlock, load_suite

pytest.importorskip("sklearn")

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 60.0
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
from lightyear_node.tasks import digits

def build(site_index, site_count, seed):
    print("tasks may print")
    if seed == 1:
        raise ValueError("no images in " + os.environ["LIGHTYEAR_DATA"])
    if seed == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return digits.build(site_index, site_count, seed, epochs=1, batch_size=64)
"""
SUITE, OUT = Path("suite.yaml"), Path("out")
RESULTS = OUT / "results.jsonl"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    monkeypatch.delenv("LIGHTYEAR_DATA", raising=False)
    Path("scratch").mkdir()


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that a report was asked for; drawing has its own tests."""
    asked: list[Path] = []

    def note(directory: Path) -> Path:
        asked.append(directory)
        return directory / "report.html"

    monkeypatch.setattr(publish, "publish", note)
    return asked


def write_suite(*grids: dict[str, Any], **more: object) -> None:
    SUITE.write_text(json.dumps({"name": "tiny", "grids": grids or [GRID], **more}))


def command(*words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The command line in this very process."""
    monkeypatch.setattr(sys, "argv", ["lightyear-node", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def started(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "lightyear_node", "experiment", str(SUITE), "--out", "out", *words],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_listen_to_signals,
    )


def _listen_to_signals() -> None:
    """Whoever runs the tests may have been told to ignore them, as by `nohup`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def children_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children()


def wait_until(happened: Callable[[], Any]) -> Any:
    """What it gives as soon as that is something."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if found := happened():
            return found
        time.sleep(0.02)
    raise AssertionError("it did not happen")


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGHUP)),
    ],
)
def test_interrupted_it_leaves_nothing_running_and_says_how_to_go_on(
    number: signal.Signals,
) -> None:
    # Nobody could wait for its end.
    write_suite(GRID | {"rounds": 100_000})
    with started("--jobs", "2") as process:
        try:
            lanes = wait_until(lambda: both if len(both := children_of(process)) == 2 else None)
            process.send_signal(number)
            _, words = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "0 of 2 jobs are finished and kept" in words
    assert "lightyear-node experiment suite.yaml --out out --resume" in words
    assert "Traceback" not in words
    assert not any(child.is_running() for child in lanes)
    assert list(Path("scratch").iterdir()) == []
    assert json.loads((OUT / "manifest.json").read_text())["finished"] is None


def test_killed_torn_and_resumed_it_ends_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of a run that was never interrupted, and nothing twice."""
    write_suite()
    with started("--jobs", "1", "--no-view") as process:
        wait_until(lambda: RESULTS.exists() and RESULTS.read_text().endswith("\n"))
        # Somebody is writing there.
        with pytest.raises(AlreadyRunning):
            Folder(OUT)
        orphans = psutil.Process(process.pid).children()
        process.kill()
        process.wait()
        for orphan in orphans:
            orphan.kill()
    [first] = read_lines(RESULTS)
    local, fedavg = expand(load_suite(SUITE))
    assert (first["key"], first["label"]) == (local.key, "local")
    # The same suite again is refused unless it is meant.
    assert command("experiment", "suite.yaml", "--out", "out", monkeypatch=monkeypatch) == 78
    # Another job had failed, and the power went while its next line was being written.
    with RESULTS.open("a") as file:
        file.write(json.dumps(failed_row("tiny", fedavg, "no luck")) + '\n{"schema_ver')
    # Meanwhile the suite has changed: another label, and a second grid with the same work.
    rules = ["local", {"name": "fedavg", "label": "averaged"}]
    write_suite(GRID | {"rules": rules}, GRID | {"name": "again", "rules": ["local", "fedavg"]})
    console = quiet()
    outcome = run(Options(suite=SUITE, out=OUT, resume=True, jobs=1), console)
    assert (outcome.total, outcome.before, outcome.failures) == (4, 2, [])
    assert "left out: 1 results that this suite does not ask for" in said(console)
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
    assert manifest["finished"] >= manifest["started"]
    assert manifest["versions"].keys() >= {"python", "torch", "numpy", "lightyear-node"}
    everything = json.dumps(manifest)
    assert platform.node() not in everything
    assert str(Path.cwd()) not in everything


def test_a_failing_job_is_recorded_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], published: list[Path]
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
    assert published == [OUT]
    assert [(one["label"], one["seeds"]) for one in data["scores"]] == [("local only", [0])]
    assert "failed: the process was killed by SIGKILL" in shown.err


def test_finished_work_is_never_done_again(
    monkeypatch: pytest.MonkeyPatch, published: list[Path]
) -> None:
    """All that is wanted is in the folder, some of it under another name."""

    async def refuse(*question: object) -> None:
        raise AssertionError("nothing is left to ask")

    monkeypatch.setattr(experiment.Nursery, "ask", refuse)
    write_suite()
    made_up = [
        failed_row("tiny", job, "") | {"sites": [], "seconds": 1.0}
        for job in expand(load_suite(SUITE))
    ]
    for row in made_up:
        del row["failed"]
    with Folder(OUT) as folder:
        folder.append(made_up)
    write_suite(GRID | {"name": "renamed"})
    outcome = run(Options(suite=SUITE, out=OUT, resume=True), quiet())
    assert (outcome.total, outcome.before, outcome.failures) == (2, 2, [])
    assert [row["grid"] for row in read_lines(RESULTS)] == ["renamed"] * 2
    outcome = run(Options(suite=SUITE, out=OUT, resume=True, only="renamed"), quiet())
    assert outcome.before == 2
    with pytest.raises(ConfigError, match="no grid `rename`") as caught:
        run(Options(suite=SUITE, out=OUT, resume=True, only="rename"), quiet())
    assert caught.value.hint == "did you mean `renamed`?"


def test_acceptance_is_measured_once_and_survives_a_run_of_one_grid(
    monkeypatch: pytest.MonkeyPatch, published: list[Path]
) -> None:
    asked: list[str] = []

    async def answer(nursery: object, module: str, *more: object) -> list[Any]:
        asked.append(module.rpartition(".")[2])
        if asked[-1] == "simulate":
            raise LabError("no luck")
        return [[{"round": 0, "malfunction": "none", "paper": True, "guard": True}]]

    monkeypatch.setattr(experiment.Nursery, "ask", answer)
    block = {"task": "digits", "clients": 3, "rounds": [0], "malfunctions": ["sfa"]}
    write_suite(GRID | {"rules": ["local"]}, acceptance=[block])
    for only, total in ((None, 2), ("main", 1), (None, 2)):
        options = Options(suite=SUITE, out=OUT, resume=True, view=False, only=only)
        outcome = run(options, quiet())
        assert outcome.total == total
        assert [message for _, message in outcome.failures] == ["no luck"]
        [row] = read_lines(OUT / "acceptance.jsonl")
        assert (row["task"], row["seed"], row["paper"]) == ("digits", 0, True)
    assert asked == ["simulate", "acceptance", "simulate", "simulate"]
    assert published == []


def test_data_is_asked_for_before_the_first_job() -> None:
    write_suite(GRID | {"task": "femnist", "args": {}})
    with pytest.raises(ConfigError, match="task femnist reads prepared data") as caught:
        run(Options(suite=SUITE, out=OUT), quiet())
    assert "--data" in str(caught.value.hint)
    Path("empty").mkdir()
    with pytest.raises(ConfigError, match=r"there is no femnist/femnist\.npz"):
        run(Options(suite=SUITE, out=OUT, data=Path("empty")), quiet())
    assert not OUT.exists()


def test_report_draws_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], published: list[Path]
) -> None:
    assert command("report", "somewhere", monkeypatch=monkeypatch) == 0
    assert published == [Path("somewhere")]
    assert capsys.readouterr().out.strip() == "somewhere/report.html"


class TestView:
    def board(self) -> Board:
        write_suite(GRID | {"malfunctions": ["none", "sfa"], "bad": [1]})
        local, clean, spoilt = expand(load_suite(SUITE))
        board = Board("tiny", 3, [Lane(clean, since=90.0, share=0.5), Lane()], began=80.0)
        board.costs.add(local, 10.0)
        board.pending = [spoilt]
        board.done = 1
        return board

    def test_the_rest_is_estimated_from_the_nearest_relatives(self) -> None:
        board = self.board()
        # Nothing but local is known: half a job of 10 s and a whole one, in two lanes.
        assert board.rest_s() == pytest.approx((5 + 10) / 2)
        board.costs.add(board.pending[0], 30.0)  # type: ignore[arg-type]
        assert board.rest_s() == pytest.approx((15 + 30) / 2)
        assert Board("tiny", 1, [Lane()], pending=board.pending).rest_s() is None

    def test_costs_grow_with_rounds_and_sites(self) -> None:
        write_suite(GRID | {"rules": ["fedavg"]}, GRID | {"name": "long", "rounds": 4})
        short, *longer = expand(load_suite(SUITE))[1:]
        costs = Costs()
        costs.add(short, 2.0)
        assert costs.expected_s(longer[-1]) == pytest.approx(8.0)
        block = AcceptanceBlock(task="digits", clients=3, rounds=(0,))
        assert costs.expected_s(AcceptanceJob(block, 0)) is None

    def test_the_picture_has_every_lane(self) -> None:
        console = Console(file=io.StringIO(), width=100, force_terminal=True)
        board = self.board()
        board.failed = 1
        console.print(picture(board, now=100.0))
        for words in (
            "tiny",
            "2 of 3",
            "1 failed",
            "20 s",
            "fedavg, seed 0",
            "50 %",
            "nothing left",
        ):
            assert words in said(console)

    def test_elsewhere_a_line_for_every_finished_job(self) -> None:
        console, board = quiet(), self.board()
        with showing(console, board) as finished:
            finished(board.pending[0], "accuracy 0.500 (3 s)")
        [words] = said(console).splitlines()
        assert "1 of 3  main: digits, fedavg, 1 of 3 sfa, seed 0: accuracy 0.500 (3 s)" in words
        assert words.endswith("about 8 s left")
        with showing(console, board, shown=False) as finished:
            finished(board.pending[0], "")
        assert len(said(console).splitlines()) == 1


def test_the_environment_of_children_is_ours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightyear_node.lab.children import child_environment

    monkeypatch.setenv("LIGHTYEAR_DATA", "/elsewhere")
    assert "LIGHTYEAR_DATA" not in child_environment(None)
    given = child_environment(Path("images"))
    assert given["LIGHTYEAR_DATA"] == os.path.abspath("images")
    assert given["OMP_NUM_THREADS"] == "1"
