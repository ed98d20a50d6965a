"""Corrupted copies of honest messages, judged and not merged: on the digits, with real sites."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from lightyear_node.config.agreement import ExchangeTerms
from lightyear_node.config.site import Malfunction, TaskEntry
from lightyear_node.lab.acceptance import Spec, measure
from lightyear_node.records import PeerName

NAMES = [PeerName(f"client-{index}") for index in range(3)]
KINDS = ["sfa", "nan", "head-flip", "label-flip", "stale", "free-rider"]
SPEC = Spec(
    NAMES,
    rounds=[0, 2],
    seed=0,
    malfunctions=[Malfunction(kind=kind) for kind in KINDS]
    + [Malfunction(kind="bias-shift", scale=3.0)],
    task=TaskEntry(args={"epochs": 2}),
)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    return measure(SPEC)


def test_every_message_meets_every_other_judge_in_every_round(
    rows: list[dict[str, object]],
) -> None:
    kinds = {"none", *KINDS, "bias-shift 3"}
    counted = Counter((row["malfunction"], row["round"]) for row in rows)
    assert counted == {(kind, round): 6 for kind in kinds for round in (0, 2)}
    assert all(row["sender"] != row["judge"] for row in rows)


def test_the_two_tests_are_told_apart(rows: list[dict[str, object]]) -> None:
    def shares(kind: str, by: str, round: int = 2) -> float:
        found = [bool(r[by]) for r in rows if (r["malfunction"], r["round"]) == (kind, round)]
        return sum(found) / len(found)

    # Agreement does not look at the head; the guard's distance does.
    assert shares("head-flip", "paper") == shares("none", "paper") == 1
    assert shares("head-flip", "guard") == 0 < shares("none", "guard")
    for kind in ("sfa", "nan", "bias-shift 3"):
        assert shares(kind, "guard", 0) == shares(kind, "guard") == 0
    assert shares("nan", "paper") == 0


def test_nothing_corrupted_is_merged(rows: list[dict[str, object]]) -> None:
    """The same honest messages, whatever else is sent beside them."""
    alone = measure(Spec(NAMES, [0, 2], 0, [], SPEC.task))
    assert [row for row in rows if row["malfunction"] == "none"] == alone


def test_a_spec_survives_the_way_to_the_process() -> None:
    assert Spec.of(SPEC.to_plain()) == SPEC
    short = replace(SPEC, exchange=ExchangeTerms(dtype="float16"))
    assert Spec.of(short.to_plain()) == short
    # Jobs that were measured before there was a choice keep their keys.
    assert "exchange" not in SPEC.to_plain()
    assert "harm_max" not in SPEC.to_plain()["rule"]


def test_rounded_messages_are_judged_as_the_whole_ones() -> None:
    """Also the stale one, which is a file of an earlier round."""
    few = replace(SPEC, rounds=[1], malfunctions=[Malfunction(kind=k) for k in ("sfa", "stale")])
    whole, short = measure(few), measure(replace(few, exchange=ExchangeTerms(dtype="bfloat16")))
    assert [row["guard"] for row in whole] == [row["guard"] for row in short]
    assert whole != short
