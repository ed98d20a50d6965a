"""An experiment's folder: durable rows, torn lines, rows kept aside, one writer at a time."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.config.federation import RuleConfig
from lightyear_node.config.node import TaskConfig
from lightyear_node.errors import AlreadyRunning, ConfigError
from lightyear_node.lab.federation import LabError
from lightyear_node.lab.jobs import SCORES_MAX, Job, client_names, copied_row, failed_row, row_of
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.lab.result_folder import ASIDE_NAME, ResultFolder, read_lines
from lightyear_node.lab.simulation_records import SimulatedRound, SimulationResult
from lightyear_node.types import PeerName, Reason, Round, Verdict

JOB = Job(
    grid="main",
    task="digits",
    entry=TaskConfig(args={"lr": 0.1}),
    metric="accuracy",
    clients=3,
    rounds=2,
    seed=7,
    rule=RuleConfig(guard=False),
    label="LIGHTYEAR",
    malfunction=MalfunctionConfig(kind="sfa"),
    bad=1,
)
NAMES = client_names(3)
[BAD] = JOB.spec().malfunctions


def line(key: str, **more: object) -> dict[str, Any]:
    return {"key": key, "work": key, **more}


def verdict(peer: PeerName, agreement: float | None = None) -> Verdict:
    """Accepted from 0.6 on; NONFINITE without an agreement."""
    if agreement is None:
        return Verdict(peer, False, Reason.NONFINITE)
    reason = Reason.OK if agreement >= 0.6 else Reason.AGREEMENT_BELOW_TAU
    return Verdict(peer, reason is Reason.OK, reason, agreement, 0.5, {"agreement": agreement})


def result(*agreements: float | None, accuracy: float = 0.5) -> SimulationResult:
    """One round per value, in which every site gives it to every other."""
    sites = {}
    for index, name in enumerate(NAMES):
        metrics = {"loss": 1.0, "accuracy": accuracy + index / 10}
        others = [other for other in NAMES if other != name]
        rounds = [
            SimulatedRound(Round(number), {}, metrics, [verdict(peer, value) for peer in others])
            for number, value in enumerate(agreements)
        ]
        sites[name] = rounds
    return SimulationResult(sites, update_bytes=100)


def test_appended_rows_can_be_read(tmp_path: Path) -> None:
    with ResultFolder(tmp_path / "new" / "out") as folder:
        folder.append([line("a"), line("b", final=None)])
        folder.append([line("a", final=1.0)])
        assert read_lines(folder.results) == [
            line("a"),
            line("b", final=None),
            line("a", final=1.0),
        ]


@pytest.mark.parametrize("torn", ['{"key": "b", "wo', "{", '{"key": "b"', "\x00\x00\x00"])
def test_a_torn_last_line_is_dropped_before_the_next_is_written(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(line("a")) + "\n" + torn)
    with ResultFolder(tmp_path) as folder:
        ours, others = folder.select(["a", "b"])
        folder.append([line("b")])
    assert (ours, others) == ({"a": line("a")}, {})
    assert path.read_text() == json.dumps(line("a")) + "\n" + json.dumps(line("b")) + "\n"


def test_a_complete_last_line_without_line_feed_is_kept(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text(json.dumps(line("a")))
    with ResultFolder(tmp_path) as folder:
        assert folder.select(["a"])[0] == {"a": line("a")}
        folder.append([line("b")])
        assert read_lines(folder.results) == [line("a"), line("b")]


@pytest.mark.parametrize("wrong", ["rubbish", "[1]", '{"work": "x"}'])
def test_an_invalid_line_is_reported_and_nothing_is_changed(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "results.jsonl"
    before = json.dumps(line("a")) + f"\n{wrong}\n" + json.dumps(line("b")) + "\n"
    path.write_text(before)
    with (
        ResultFolder(tmp_path) as folder,
        pytest.raises(ConfigError, match=r"(l:|result )2") as caught,
    ):
        folder.select(["a", "b"])
    assert "remove that line" in str(caught.value.hint)
    assert path.read_text() == before


def test_rows_outside_the_suite_are_kept_aside_until_needed(tmp_path: Path) -> None:
    with ResultFolder(tmp_path) as folder:
        folder.append([line("a"), line("b"), line("c")])
    with ResultFolder(tmp_path) as folder:
        assert folder.select(["b"]) == ({"b": line("b")}, {"a": line("a"), "c": line("c")})
        assert read_lines(folder.results) == [line("b")]
        assert read_lines(tmp_path / ASIDE_NAME) == [line("a"), line("c")]
    with ResultFolder(tmp_path) as folder:
        ours, others = folder.select(["a", "b", "c"])
    assert ours.keys() == {"a", "b", "c"}
    assert others == {}
    assert not (tmp_path / ASIDE_NAME).exists()


def test_the_last_row_of_a_key_counts(tmp_path: Path) -> None:
    with ResultFolder(tmp_path) as folder:
        folder.append([line("a", failed="x"), line("b"), line("a", final=1)])
        assert folder.select(["a", "b"])[0] == {"a": line("a", final=1), "b": line("b")}


def test_a_folder_is_locked_against_a_second_run(tmp_path: Path) -> None:
    with (
        ResultFolder(tmp_path),
        pytest.raises(AlreadyRunning, match="another experiment is writing"),
    ):
        ResultFolder(tmp_path)
    with ResultFolder(tmp_path):
        pass


def test_a_first_run_refuses_a_folder_with_results(tmp_path: Path) -> None:
    with ResultFolder(tmp_path) as folder:
        folder.require_empty()
        folder.results.touch()
        folder.require_empty()
        folder.append([line("a")])
        with pytest.raises(ConfigError, match="has results already") as caught:
            folder.require_empty()
    assert "--resume" in str(caught.value.hint)


def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        ResultFolder(tmp_path / "file" / "out")


def test_a_row_counts_verdicts_by_reason() -> None:
    row = row_of("tiny", JOB, result(0.9, 0.3, None), 1.23456)
    assert {site["name"]: site["malfunctioning"] for site in row["sites"]} == {
        name: name == BAD for name in NAMES
    }
    assert [site["final"] for site in row["sites"]] == [0.5, 0.6, 0.7]
    # Six verdicts per round: two on the bad site, four on the two others.
    assert row["verdicts"] == {
        "honest": {"agreement_below_tau": 4, "nonfinite": 4, "ok": 4},
        "malfunctioning": {"agreement_below_tau": 2, "nonfinite": 2, "ok": 2},
    }
    assert sorted(row["scores"]["malfunctioning"]) == [0.3, 0.3, 0.9, 0.9]
    assert (row["key"], row["work"], row["seconds"]) == (JOB.key, JOB.work, 1.235)
    assert (row["malfunction"], row["malfunction_terms"]) == ("sfa", {"kind": "sfa", "scale": None})
    assert (row["bad"], row["rule"], row["rule_terms"]["guard"]) == (1, "lightyear", False)
    assert row["update_bytes"] == 100


def test_a_diverged_model_has_no_score_and_the_line_is_json() -> None:
    row = row_of("tiny", JOB, result(0.9, accuracy=math.nan), 1.0)
    assert [site["final"] for site in row["sites"]] == [None] * 3
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_scores_are_thinned_evenly() -> None:
    rounds = SCORES_MAX  # four honest scores each
    row = row_of("tiny", JOB, result(*(number / rounds for number in range(rounds))), 1.0)
    scores = row["scores"]["honest"]
    assert SCORES_MAX / 2 < len(scores) <= SCORES_MAX
    assert (min(scores), max(scores)) == (pytest.approx(0, abs=0.01), pytest.approx(1, abs=0.01))


def test_an_unknown_metric_is_refused_by_name() -> None:
    with pytest.raises(LabError, match="no metric `dice`; it has loss, accuracy"):
        row_of("tiny", replace(JOB, metric="dice"), result(0.9), 1.0)


def test_a_copied_row_equals_that_of_the_other_job() -> None:
    other = replace(JOB, grid="again", label="as in the paper", metric="loss")
    row = copied_row(row_of("tiny", JOB, result(0.9), 1.0), "tiny", other)
    assert row == row_of("tiny", other, result(0.9), 1.0)
    assert row["key"] != JOB.key


def test_a_failed_row_identifies_its_job() -> None:
    row, good = failed_row("tiny", JOB, "no luck"), row_of("tiny", JOB, result(0.9), 1.0)
    assert row["failed"] == "no luck"
    assert {k: v for k, v in row.items() if k != "failed"}.items() <= good.items()
