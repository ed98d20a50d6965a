"""The order of the rules is compared with that of the paper's tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightyear_node.lab.paper_order import OrderComparison, compare_order, rank_correlation
from lightyear_node.lab.results_reader import FaultSetting, read
from lightyear_node.lab.summary import Section, sections
from lightyear_node.lab.tables import chapters
from tests.support.invented_results import job, write


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 400], 1),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1),
        ([86, 0, 60, 93], [70, 10, 60, 20], 0.4),  # 1 − 6 · 6 / (4 · 15)
        ([1, 1, 2], [5, 6, 7], 0.8660254),
        ([1, 1, 1], [5, 6, 7], None),
    ],
)
def test_the_rank_correlation_equals_values_computed_by_hand(
    left: list[float], right: list[float], expected: float | None
) -> None:
    found = rank_correlation(left, right)
    assert found == (None if expected is None else pytest.approx(expected))
    assert rank_correlation(right, left) == found


def section_of(folder: Path, finals: dict[str, float | None]) -> Section:
    lines = [job(rule, [final] * 8, malfunction="sfa", bad=1) for rule, final in finals.items()]
    [section] = sections(read(write(folder, lines)).rows)
    return section


def test_the_order_is_that_of_the_rules_that_both_tables_have(tmp_path: Path) -> None:
    finals = {"krum": 0.1, "fedavg": 0.2, "afa": 0.5, "lightyear": 0.0}  # with the guard
    section = section_of(tmp_path, finals)
    assert compare_order(section, FaultSetting("sfa")) == [OrderComparison(1, 3, pytest.approx(1))]
    assert compare_order(section, FaultSetting("ana")) == []


def test_a_rule_that_diverged_is_the_last(tmp_path: Path) -> None:
    section = section_of(tmp_path, {"krum": 0.1, "fedavg": 0.2, "afa": None})
    [compared] = compare_order(section, FaultSetting("sfa"))
    assert compared.correlation == pytest.approx(-0.5)


def test_two_rules_have_no_order_to_compare(tmp_path: Path) -> None:
    assert compare_order(section_of(tmp_path, {"krum": 0.1, "afa": 0.2}), FaultSetting("sfa")) == []


def test_the_report_states_the_correlation(tmp_path: Path) -> None:
    lines = [
        job(rule, [final] * 8, malfunction="sfa", bad=bad)
        for bad, sign in ((1, 1), (2, -1))
        for rule, final in (("krum", 0.5 - sign / 10), ("fedavg", 0.5), ("afa", 0.5 + sign / 10))
    ]
    notes = [
        note
        for part in chapters(read(write(tmp_path, lines)))
        for table in part.tables
        for note in table.notes
    ]
    assert (
        "Rank correlation (Spearman's ρ) of the order of the rules, ours with the paper's, by"
        " number of malfunctioning clients: 1.00 (1; 3 rules), −1.00 (2; 3 rules)."
    ) in notes
