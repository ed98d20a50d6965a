"""Shares of accepted messages, counted by hand."""

from __future__ import annotations

from typing import Any

from lightyear_node.lab.acceptance_table import chapter


def line(kind: str, round: int, paper: bool, guard: bool, **changed: Any) -> dict[str, Any]:
    reason = "ok" if guard else "too_far"
    return {
        "task": "heart", "seed": 0, "round": round, "malfunction": kind, "paper": paper,
        "guard": guard, "reason": reason, **changed,
    }  # fmt: skip


def test_shares_are_given_by_kind_and_round() -> None:
    lines = [
        *[line("none", 0, True, True)] * 3,
        line("none", 2, True, False, reason="loss_regret", seed=1),
        *[line("sfa", 0, True, False)] * 3,
        line("sfa", 0, False, False, reason="domain"),
        line("ana", 2, True, False, task="pcam"),
    ]
    found = chapter(lines)
    assert found is not None
    heart, pcam = found.tables
    assert heart.title == "heart: messages accepted"
    assert [[entry.text for entry in row] for row in heart.lines] == [
        ["honest", "4", "100", "75", "100 0", "loss_regret 1"],
        ["sfa", "4", "75", "0", "0 ·", "too_far 3, domain 1"],
    ]
    assert heart.notes == ["Rounds 0, 2; seeds 0, 1."]
    assert [row[0].text for row in pcam.lines] == ["ana"]


def test_rules_have_tables_of_their_own_with_the_agreement_of_each_round() -> None:
    lines = [
        line("none", 0, True, True, rule="softmax", agreement=0.9),
        line("none", 0, True, True, rule="softmax", agreement=0.7),
        line("none", 2, False, False, rule="softmax", agreement=-0.1),
        line("sfa", 0, False, False, rule="softmax", agreement=None),
        line("none", 0, True, True),
    ]
    found = chapter(lines)
    assert found is not None
    plain, softmax = found.tables
    assert [table.title for table in found.tables] == [
        "heart: messages accepted", "heart, softmax: messages accepted",
    ]  # fmt: skip
    assert len(plain.columns) == len(plain.lines[0]) == 6
    assert len(softmax.columns) == len(softmax.lines[0]) == 8
    assert [[entry.text for entry in row[2:5]] for row in softmax.lines] == [
        ["66.7", "0.80 -0.10", "100 0"],
        ["0", "· ·", "0 ·"],
    ]


def test_small_shares_are_not_rounded_to_zero() -> None:
    lines = [line("sfa", 0, True, number == 0) for number in range(5000)]
    [table] = chapter(lines).tables  # type: ignore[union-attr]
    assert [entry.text for entry in table.lines[0][2:4]] == ["100", "0.1"]
    lines = [line("none", 0, number > 0, True) for number in range(5000)]
    [table] = chapter(lines).tables  # type: ignore[union-attr]
    assert table.lines[0][2].text == "99.9"


def test_without_measurements_there_is_no_chapter() -> None:
    assert chapter([]) is None
