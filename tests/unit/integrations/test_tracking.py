"""Tracking output, read back with the real packages."""

from __future__ import annotations

import csv
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.integrations.tracking import Tracking, Writer, recorded_rounds
from lightyear_node.integrations.tracking.csv_files import tables
from lightyear_node.integrations.tracking.flat_rows import series
from lightyear_node.integrations.tracking.mlflow_run import Mlflow
from lightyear_node.integrations.tracking.tensorboard_events import TensorBoard
from lightyear_node.storage.history import Entry
from tests.support.journals import IDENTITIES, NAMES, JournalSite, run_rounds

NAMES_OF_FILES = ("rounds.jsonl", "rounds.csv", "verdicts.csv")
DEADLINE_S = 60.0


class TrackedSite:
    """A site that runs rounds, and the reports of its tracking."""

    def __init__(self, folder: Path) -> None:
        self.sites = [JournalSite(folder / name, IDENTITIES[name]) for name in NAMES]
        self.state_dir = self.sites[0].path.parent
        self.reports: list[tuple[str, bool]] = []
        self.rounds = 0

    def run(self, rounds: int = 1) -> None:
        run_rounds(self.sites, range(self.rounds, self.rounds + rounds))
        self.rounds += rounds

    def tracking(self, writers: Sequence[Writer] | None = None) -> Tracking:
        writers = tables(self.state_dir) if writers is None else writers
        tracking = Tracking(self.sites[0].path, writers, self.report)
        self.sites[0].round_journal.history.followers[:] = [tracking.follow]
        return tracking

    def report(self, text: str, bad: bool) -> None:
        self.reports.append((text, bad))

    def written(self) -> dict[str, bytes]:
        return {name: (self.state_dir / name).read_bytes() for name in NAMES_OF_FILES}


@pytest.fixture
def tracked(tmp_path: Path) -> Iterator[TrackedSite]:
    tracked = TrackedSite(tmp_path / "sites")
    yield tracked
    for site in tracked.sites:
        site.close()


def test_every_round_is_written(tracked: TrackedSite) -> None:
    tracking = tracked.tracking()
    tracked.run(3)
    tracking.close()
    lines = [json.loads(line) for line in tracked.written()["rounds.jsonl"].splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2]
    assert lines[1]["local.loss"] == 1.5
    assert lines[1]["merged.loss"] == 1.25
    assert (lines[1]["accepted"], lines[1]["rejected"], lines[1]["missing"]) == (1, 1, 0)
    assert {one["peer"]: one["reason"] for one in lines[1]["verdicts"]} == {
        "site-b": "ok",
        "site-c": "too_far",
    }
    with (tracked.state_dir / "rounds.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["round"], row["merged.loss"]) for row in rows] == [
        ("0", "1.25"),
        ("1", "1.25"),
        ("2", "1.25"),
    ]
    with (tracked.state_dir / "verdicts.csv").open(newline="") as file:
        verdicts = list(csv.DictReader(file))
    assert len(verdicts) == 6
    assert {row["distance"] for row in verdicts if row["peer"] == "site-c"} == {"1.9"}
    assert tracked.reports == []


def damage_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def damage_doubled(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content + content.splitlines(keepends=True)[-1])


def damage_changed(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"1.25", b"9.75").replace(b"0.81", b"0.99"))


@pytest.mark.parametrize(
    ("damage", "running"),
    [
        *((damage, False) for damage in (Path.unlink, damage_short, damage_doubled)),
        *((damage, True) for damage in (Path.unlink, damage_short, damage_doubled)),
        # Content of the right length is only checked when the node starts.
        (damage_changed, False),
    ],
)
def test_missing_or_damaged_files_are_rebuilt(
    tracked: TrackedSite, damage: Callable[[Path], None], running: bool
) -> None:
    tracking = tracked.tracking()
    tracked.run(2)
    if running:
        wait_for(lambda: lines_in(tracked) == 2)
    else:
        tracking.close()
        tracked.sites[0].round_journal.history.followers.clear()
    for name in NAMES_OF_FILES:
        damage(tracked.state_dir / name)
    tracked.run()  # not tracked if the node was stopped
    if not running:
        tracking = tracked.tracking()
    tracking.close()
    found = tracked.written()
    for name in NAMES_OF_FILES:
        (tracked.state_dir / name).unlink()
    tracked.tracking().close()
    assert found == tracked.written()
    assert lines_in(tracked) == 3


def lines_in(tracked: TrackedSite) -> int:
    path = tracked.state_dir / "verdicts.csv"
    whole = path.exists() and path.read_bytes().count(b"\n") == 2 * tracked.rounds + 1
    return len((tracked.state_dir / "rounds.jsonl").read_bytes().splitlines()) if whole else -1


def wait_for(condition: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(int(DEADLINE_S / 0.02)):
        if condition():
            return
        waiting.wait(0.02)
    raise AssertionError("timeout")


def test_a_full_disk_is_reported_once_and_recovered_from(tracked: TrackedSite) -> None:
    """Links to /dev/full replace the files until the first attempt, which a restart makes."""
    tracking = tracked.tracking()
    tracked.run()
    tracking.close()  # a queued round would use up the links too early
    for name in NAMES_OF_FILES:
        (tracked.state_dir / name).unlink()
        (tracked.state_dir / f"{name}.part").symlink_to("/dev/full")
    tracking = tracked.tracking()
    wait_for(lambda: len(tracked.reports) == 3)
    assert all(bad and "No space left" in text for text, bad in tracked.reports)
    tracked.run(2)
    tracking.close()
    assert lines_in(tracked) == 3
    assert [bad for _, bad in tracked.reports] == [True] * 3 + [False] * 3


def test_a_repeated_round_is_written_once(tracked: TrackedSite) -> None:
    tracking = tracked.tracking()
    tracked.run(2)
    run_rounds(tracked.sites, [1])
    tracking.close()
    lines = tracked.written()["rounds.jsonl"].splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 1]


class Stuck:
    """A writer that blocks."""

    name = "stuck"

    def __init__(self) -> None:
        self.free = threading.Event()

    def rebuild(self, rounds: Sequence[Entry]) -> None:
        self.free.wait(DEADLINE_S)

    def add(self, entry: Entry) -> None: ...

    def close(self) -> None: ...


def test_a_blocked_writer_delays_no_rounds(tracked: TrackedSite) -> None:
    stuck = Stuck()
    tracking = tracked.tracking([stuck, *tables(tracked.state_dir)])
    tracked.run(70)  # more than the queue holds
    tracking.close()  # returns at once: the queue is full
    assert not (tracked.state_dir / "rounds.jsonl").exists()
    stuck.free.set()
    wait_for(lambda: lines_in(tracked) == 70)
    tracking.close(DEADLINE_S)
    assert lines_in(tracked) == 70


def test_tensorboard_has_every_round_once(tracked: TrackedSite, tmp_path: Path) -> None:
    folder = tmp_path / "board"
    for _ in range(2):  # a restart
        tracking = tracked.tracking([TensorBoard(folder, "site-a")])
        tracked.run(2)
        tracking.close()
    assert tracked.reports == []
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder))
    board.Reload()
    expected = recorded_rounds(tracked.sites[0].path)
    assert set(board.Tags()["scalars"]) == set(series(expected[0]))
    for tag in board.Tags()["scalars"]:
        found = [(event.step, event.value) for event in board.Scalars(tag)]
        expected_values = [(one["round"], pytest.approx(series(one)[tag])) for one in expected]
        assert found == expected_values
    assert board.Scalars("score/site-b")[0].wall_time == expected[0]["time"]


def mlflow_writer(uri: str) -> Mlflow:
    about = {"task": "ward:build"}
    return Mlflow(uri, federation="ward", site="site-a", journal="ab" * 32, about=about)


def test_mlflow_has_every_round_in_one_run(
    tracked: TrackedSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    uri = (tmp_path / "store").as_uri()
    for _ in range(2):
        tracking = tracked.tracking([mlflow_writer(uri)])
        tracked.run(2)
        wait_for_end(tracking)
    assert tracked.reports == []
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("ward")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    assert run.data.params == {"task": "ward:build"}
    expected = recorded_rounds(tracked.sites[0].path)
    for name in series(expected[0]):
        history = client.get_metric_history(run.info.run_id, name)
        expected_values = [(one["round"], series(one)[name]) for one in expected]
        assert sorted((one.step, one.value) for one in history) == expected_values


def wait_for_end(tracking: Tracking) -> None:
    """Wait longer than a node would: the package takes seconds to load."""
    tracking.close(DEADLINE_S)


def test_an_unreachable_server_is_reported_once_without_its_password(
    tracked: TrackedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    uri = "http://ward:secret@127.0.0.1:9"
    tracking = tracked.tracking([mlflow_writer(uri), *tables(tracked.state_dir)])
    tracked.run(3)
    wait_for_end(tracking)
    assert lines_in(tracked) == 3
    [(text, bad)] = tracked.reports
    assert bad
    assert "mlflow cannot be written" in text
    assert "secret" not in text


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "tensorboard"), ("mlflow", "mlflow")])
def test_a_missing_package_is_named(
    tracked: TrackedSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    hidden: dict[str, Any] = {key: None for key in sys.modules if key.split(".")[0] == module}
    for key in {module, *hidden}:
        monkeypatch.setitem(sys.modules, key, None)
    board = TensorBoard(tmp_path / "board", "site-a")
    writer = board if name == "tensorboard" else mlflow_writer("http://127.0.0.1:9")
    tracking = tracked.tracking([writer])
    tracked.run(2)
    wait_for_end(tracking)
    [(text, _)] = tracked.reports
    assert f"lightyear-node[{name}]" in text


def test_tracking_resumes_from_the_newest_rounds(
    tracked: TrackedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the whole journal at every start would take longer with every round."""
    tracking = tracked.tracking()
    tracked.run(6)
    tracking.close()
    before = tracked.written()
    recent = tracked.sites[0].round_journal.rounds()[3:]

    def all_rounds(journal: Path) -> list[Entry]:
        raise AssertionError("the whole journal was read")

    with monkeypatch.context() as patched:
        patched.setattr("lightyear_node.integrations.tracking.recorded_rounds", all_rounds)
        tracking = Tracking(
            tracked.sites[0].path, tables(tracked.state_dir), tracked.report, recent
        )
        tracked.sites[0].round_journal.history.followers[:] = [tracking.follow]
        tracked.run(2)
        tracking.close()
    after = tracked.written()
    assert all(after[name].startswith(before[name]) for name in NAMES_OF_FILES)
    lines = [json.loads(line) for line in after["rounds.jsonl"].splitlines()]
    assert [line["round"] for line in lines] == list(range(8))
    assert len(after["rounds.csv"].splitlines()) == 1 + 8


@pytest.mark.parametrize("name", NAMES_OF_FILES)
@pytest.mark.parametrize("damage", ["short", "other", "missing"])
def test_a_file_without_the_newest_rounds_is_rebuilt(
    tracked: TrackedSite, name: str, damage: str
) -> None:
    tracking = tracked.tracking()
    tracked.run(4)
    tracking.close()
    before = tracked.written()
    path = tracked.state_dir / name
    if damage == "missing":
        path.unlink()
    else:
        content = before[name]
        path.write_bytes(content[:-20] if damage == "short" else content[:-2] + b"x\n")
    recent = tracked.sites[0].round_journal.rounds()[2:]
    Tracking(tracked.sites[0].path, tables(tracked.state_dir), tracked.report, recent).close()
    assert tracked.written() == before
