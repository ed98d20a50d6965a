"""Curves in results, and `read_results`: every round of every site as flat records."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightyear_node import LightyearError, read_results
from lightyear_node.config.federation import RuleConfig
from lightyear_node.config.node import TaskConfig
from lightyear_node.lab.jobs import Job, client_names, copied_row, row_of
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.lab.results_reader import read
from lightyear_node.lab.simulation_records import SimulatedRound, SimulationResult
from lightyear_node.types import Round
from tests.support.paths import DOCS

JOB = Job(
    grid="main",
    task="digits",
    entry=TaskConfig(),
    metric="accuracy",
    clients=2,
    rounds=3,
    seed=7,
    rule=RuleConfig(name="fedavg"),
    label="averaged",
    malfunction=MalfunctionConfig(kind="mine:attack", options={"z": 1.5}),
    bad=1,
)
[BAD] = JOB.spec().malfunctions
HONEST = next(name for name in client_names(2) if name != BAD)


def measured(round: int, offset: float) -> SimulatedRound:
    local = {"loss": math.nan if round == 1 else 1 / 3, "accuracy": offset + round / 10}
    return SimulatedRound(Round(round), local, {**local, "accuracy": offset + round / 5}, ())


RESULT = SimulationResult(
    {name: [measured(n, 0.1 * i) for n in range(3)] for i, name in enumerate((HONEST, BAD))}
)


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_row_has_the_metrics_of_every_round_and_site() -> None:
    [honest] = [s for s in row_of("tiny", JOB, RESULT, 1.0)["sites"] if s["name"] == HONEST]
    assert honest["curves"] == {
        "local.loss": [0.333333, None, 0.333333],
        "local.accuracy": [0.0, 0.1, 0.2],
        "merged.loss": [0.333333, None, 0.333333],
        "merged.accuracy": [0.0, 0.2, 0.4],
    }
    assert honest["final"] == 0.4


def test_curves_are_optional_and_do_not_change_the_work() -> None:
    without = replace(JOB, curves=False)
    assert (without.work, without.key) == (JOB.work, JOB.key)
    assert (without.spec().final_only, JOB.spec().final_only) == (True, False)
    row = row_of("tiny", without, RESULT, 1.0)
    assert not any("curves" in site for site in row["sites"])


def test_there_is_a_flat_record_for_every_site_and_round(tmp_path: Path) -> None:
    row = row_of("tiny", JOB, RESULT, 1.0)
    other = replace(JOB, grid="again", label="other", metric="loss")
    records = read_results(written(tmp_path, row, copied_row(row, "tiny", other)))
    assert len(records) == 2 * 2 * 3
    assert all(
        isinstance(value, str | int | float | None) for one in records for value in one.values()
    )
    [one] = [r for r in records if (r["grid"], r["site"], r["round"]) == ("main", HONEST, 2)]
    assert one == {
        "suite": "tiny", "grid": "main", "task": "digits", "arguments": "{}", "clients": 2,
        "partition": None, "participation": 1.0, "rule": "fedavg", "label": "averaged",
        "rule_terms": one["rule_terms"],
        "malfunction": "mine:attack z=1.5", "scale": None, "bad": 1, "seed": 7, "site": HONEST,
        "site_malfunctions": False, "round": 2, "local.loss": 0.333333, "local.accuracy": 0.2,
        "merged.loss": 0.333333, "merged.accuracy": 0.4,
    }  # fmt: skip
    assert json.loads(one["rule_terms"])["name"] == "fedavg"


def test_results_from_before_curves_have_a_record_for_the_last_round() -> None:
    published = DOCS / "results" / "femnist"
    records, rows = read_results(published), read(published).rows
    assert len(records) == sum(len(row.sites) for row in rows) > 0
    assert {record["round"] for record in records} == {row.setting.rounds - 1 for row in rows}
    finals = [site.final for row in rows for site in row.sites]
    assert [record["merged.accuracy"] for record in records] == finals


def test_a_shorter_curve_is_filled_with_none(tmp_path: Path) -> None:
    row = row_of("tiny", JOB, RESULT, 1.0)
    row["sites"][0]["curves"]["merged.loss"].pop()
    records = read_results(written(tmp_path, row))
    assert sum(record["merged.loss"] is None for record in records) == 2 + 1


def test_a_folder_without_results_is_our_error(tmp_path: Path) -> None:
    with pytest.raises(LightyearError, match="no results"):
        read_results(tmp_path)
