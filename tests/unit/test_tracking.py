"""Rounds for people's own tools: the real packages read what was written for them."""

from __future__ import annotations

import csv
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.history import Entry
from lightyear_node.tracking import Tracking, Writer, recorded_rounds
from lightyear_node.tracking.flat import series
from lightyear_node.tracking.tables import tables
from lightyear_node.tracking.to_mlflow import Mlflow
from lightyear_node.tracking.to_tensorboard import TensorBoard
from tests.unit.annals import IDENTITIES, NAMES, Annalist, run_rounds

NAMES_OF_FILES = ("rounds.jsonl", "rounds.csv", "verdicts.csv")
DEADLINE_S = 60.0


class Office:
    """A site's record that goes on, and what its tracking said."""

    def __init__(self, folder: Path) -> None:
        self.sites = [Annalist(folder / name, IDENTITIES[name]) for name in NAMES]
        self.state_dir = self.sites[0].path.parent
        self.said: list[tuple[str, bool]] = []
        self.rounds = 0

    def go_on(self, rounds: int = 1) -> None:
        run_rounds(self.sites, range(self.rounds, self.rounds + rounds))
        self.rounds += rounds

    def tracking(self, writers: Sequence[Writer] | None = None) -> Tracking:
        writers = tables(self.state_dir) if writers is None else writers
        tracking = Tracking(self.sites[0].path, writers, self._hear)
        self.sites[0].ledger.history.followers[:] = [tracking.follow]
        return tracking

    def _hear(self, text: str, bad: bool) -> None:
        self.said.append((text, bad))

    def written(self) -> dict[str, bytes]:
        return {name: (self.state_dir / name).read_bytes() for name in NAMES_OF_FILES}


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    office = Office(tmp_path / "sites")
    yield office
    for site in office.sites:
        site.close()


def test_every_round_has_its_lines(office: Office) -> None:
    tracking = office.tracking()
    office.go_on(3)
    tracking.close()
    lines = [json.loads(line) for line in office.written()["rounds.jsonl"].splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2]
    assert lines[1]["local.loss"] == 1.5
    assert lines[1]["merged.loss"] == 1.25
    assert (lines[1]["accepted"], lines[1]["rejected"], lines[1]["missing"]) == (1, 1, 0)
    assert {one["peer"]: one["reason"] for one in lines[1]["verdicts"]} == {
        "site-b": "ok",
        "site-c": "too_far",
    }
    with (office.state_dir / "rounds.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["round"], row["merged.loss"]) for row in rows] == [
        ("0", "1.25"),
        ("1", "1.25"),
        ("2", "1.25"),
    ]
    with (office.state_dir / "verdicts.csv").open(newline="") as file:
        verdicts = list(csv.DictReader(file))
    assert len(verdicts) == 6
    assert {row["distance"] for row in verdicts if row["peer"] == "site-c"} == {"1.9"}
    assert office.said == []


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
        # What has the right length is only looked at when the node starts.
        (damage_changed, False),
    ],
)
def test_what_is_missing_or_damaged_is_made_again(
    office: Office, damage: Callable[[Path], None], running: bool
) -> None:
    tracking = office.tracking()
    office.go_on(2)
    if running:
        wait_for(lambda: lines_in(office) == 2)
    else:
        tracking.close()
        office.sites[0].ledger.history.followers.clear()
    for name in NAMES_OF_FILES:
        damage(office.state_dir / name)
    office.go_on()  # with nobody to write it down, if the node was killed just then
    if not running:
        tracking = office.tracking()
    tracking.close()
    found = office.written()
    for name in NAMES_OF_FILES:
        (office.state_dir / name).unlink()
    office.tracking().close()
    assert found == office.written()
    assert lines_in(office) == 3


def lines_in(office: Office) -> int:
    path = office.state_dir / "verdicts.csv"
    whole = path.exists() and path.read_bytes().count(b"\n") == 2 * office.rounds + 1
    return len((office.state_dir / "rounds.jsonl").read_bytes().splitlines()) if whole else -1


def wait_for(condition: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(int(DEADLINE_S / 0.02)):
        if condition():
            return
        waiting.wait(0.02)
    raise AssertionError("it did not happen")


def test_a_full_disk_is_told_once_and_made_up_for(office: Office) -> None:
    """The device that is always full stands for the files, until they have been tried."""
    tracking = office.tracking()
    office.go_on()
    wait_for(lambda: lines_in(office) == 1)
    for name in NAMES_OF_FILES:
        (office.state_dir / name).unlink()
        (office.state_dir / f"{name}.part").symlink_to("/dev/full")
    office.go_on()
    wait_for(lambda: len(office.said) == 3)
    assert all(bad and "No space left" in text for text, bad in office.said)
    office.go_on()
    tracking.close()
    assert lines_in(office) == 3
    assert [bad for _, bad in office.said] == [True] * 3 + [False] * 3


def test_a_round_done_twice_counts_once(office: Office) -> None:
    tracking = office.tracking()
    office.go_on(2)
    run_rounds(office.sites, [1])
    tracking.close()
    lines = office.written()["rounds.jsonl"].splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 1]


class Stuck:
    """A server that neither answers nor fails."""

    name = "stuck"

    def __init__(self) -> None:
        self.free = threading.Event()

    def begin(self, rounds: Sequence[Entry]) -> None:
        self.free.wait(DEADLINE_S)

    def add(self, entry: Entry) -> None: ...

    def close(self) -> None: ...


def test_who_is_stuck_holds_up_nobody(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightyear_node.tracking.CLOSE_S", 0.1)
    stuck = Stuck()
    tracking = office.tracking([stuck, *tables(office.state_dir)])
    office.go_on(70)  # more than may wait
    tracking.close()
    stuck.free.set()
    office.tracking().close()
    assert lines_in(office) == 70


def test_tensorboard_reads_every_round_once(office: Office, tmp_path: Path) -> None:
    folder = tmp_path / "board"
    for _ in range(2):  # a node that is started again
        tracking = office.tracking([TensorBoard(folder, "site-a")])
        office.go_on(2)
        tracking.close()
    assert office.said == []
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder))
    board.Reload()
    expected = recorded_rounds(office.sites[0].path)
    assert set(board.Tags()["scalars"]) == set(series(expected[0]))
    for tag in board.Tags()["scalars"]:
        found = [(event.step, event.value) for event in board.Scalars(tag)]
        wanted = [(one["round"], pytest.approx(series(one)[tag])) for one in expected]
        assert found == wanted
    assert board.Scalars("score/site-b")[0].wall_time == expected[0]["time"]


def mlflow_writer(uri: str) -> Mlflow:
    about = {"task": "ward:build"}
    return Mlflow(uri, federation="ward", site="site-a", journal="ab" * 32, about=about)


def test_mlflow_has_every_round_in_one_run(
    office: Office, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    uri = (tmp_path / "store").as_uri()
    for _ in range(2):
        tracking = office.tracking([mlflow_writer(uri)])
        office.go_on(2)
        wait_for_end(tracking)
    assert office.said == []
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("ward")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    assert run.data.params == {"task": "ward:build"}
    expected = recorded_rounds(office.sites[0].path)
    for name in series(expected[0]):
        history = client.get_metric_history(run.info.run_id, name)
        wanted = [(one["round"], series(one)[name]) for one in expected]
        assert sorted((one.step, one.value) for one in history) == wanted


def wait_for_end(tracking: Tracking) -> None:
    """The package takes seconds to load."""
    tracking.close()
    tracking._thread.join(DEADLINE_S)


def test_an_unreachable_server_is_told_once_without_its_password(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    uri = "http://ward:secret@127.0.0.1:9"
    tracking = office.tracking([mlflow_writer(uri), *tables(office.state_dir)])
    office.go_on(3)
    wait_for_end(tracking)
    assert lines_in(office) == 3
    [(text, bad)] = office.said
    assert bad
    assert "mlflow cannot be written" in text
    assert "secret" not in text


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "tensorboard"), ("mlflow", "mlflow")])
def test_a_package_that_is_missing_is_named(
    office: Office, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    hidden: dict[str, Any] = {key: None for key in sys.modules if key.split(".")[0] == module}
    for key in {module, *hidden}:
        monkeypatch.setitem(sys.modules, key, None)
    board = TensorBoard(tmp_path / "board", "site-a")
    writer = board if name == "tensorboard" else mlflow_writer("http://127.0.0.1:9")
    tracking = office.tracking([writer])
    office.go_on(2)
    wait_for_end(tracking)
    [(text, _)] = office.said
    assert f"lightyear-node[{name}]" in text
