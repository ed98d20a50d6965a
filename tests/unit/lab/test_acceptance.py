"""Corrupted copies of honest messages are judged and not merged; on the digits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from lightyear_node.config.federation import ExchangeConfig
from lightyear_node.config.node import TaskConfig
from lightyear_node.lab.acceptance import AcceptanceSpec, measure
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.types import PeerName

pytestmark = pytest.mark.slow

NAMES = [PeerName(f"client-{index}") for index in range(3)]
KINDS = ["sfa", "nan", "head-flip", "label-flip", "stale", "free-rider"]
SPEC = AcceptanceSpec(
    NAMES,
    rounds=[0, 2],
    seed=0,
    malfunctions=[MalfunctionConfig(kind=kind) for kind in KINDS]
    + [MalfunctionConfig(kind="bias-shift", scale=3.0)],
    task=TaskConfig(args={"epochs": 2}),
)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    return measure(SPEC)


def test_every_message_is_judged_by_every_other_site_in_every_round(
    rows: list[dict[str, object]],
) -> None:
    kinds = {"none", *KINDS, "bias-shift 3"}
    counted = Counter((row["malfunction"], row["round"]) for row in rows)
    assert counted == {(kind, round): 6 for kind in kinds for round in (0, 2)}
    assert all(row["sender"] != row["judge"] for row in rows)


def test_the_guard_and_the_papers_test_differ(rows: list[dict[str, object]]) -> None:
    def shares(kind: str, by: str, round: int = 2) -> float:
        found = [bool(r[by]) for r in rows if (r["malfunction"], r["round"]) == (kind, round)]
        return sum(found) / len(found)

    # The agreement does not depend on the final layer; the guard's distance does.
    assert shares("head-flip", "paper") == shares("none", "paper") == 1
    assert shares("head-flip", "guard") == 0 < shares("none", "guard")
    for kind in ("sfa", "nan", "bias-shift 3"):
        assert shares(kind, "guard", 0) == shares(kind, "guard") == 0
    assert shares("nan", "paper") == 0


def test_nothing_corrupted_is_merged(rows: list[dict[str, object]]) -> None:
    """Verdicts on honest messages do not depend on the corrupted ones."""
    alone = measure(AcceptanceSpec(NAMES, [0, 2], 0, [], SPEC.task))
    assert [row for row in rows if row["malfunction"] == "none"] == alone


def test_a_spec_survives_conversion_to_plain_values() -> None:
    assert AcceptanceSpec.of(SPEC.to_plain()) == SPEC
    short = replace(SPEC, exchange=ExchangeConfig(dtype="float16"))
    assert AcceptanceSpec.of(short.to_plain()) == short
    # Defaults are left out, so that the keys of old jobs stay valid.
    assert "exchange" not in SPEC.to_plain()
    assert "harm_max" not in SPEC.to_plain()["rule"]


def test_rounded_messages_get_the_same_verdicts() -> None:
    """Including the stale one, a file of an earlier round."""
    few = replace(
        SPEC, rounds=[1], malfunctions=[MalfunctionConfig(kind=k) for k in ("sfa", "stale")]
    )
    whole, short = measure(few), measure(replace(few, exchange=ExchangeConfig(dtype="bfloat16")))
    assert [row["guard"] for row in whole] == [row["guard"] for row in short]
    assert whole != short
