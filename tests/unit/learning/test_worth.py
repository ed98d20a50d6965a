"""The choice between the federated model and the one trained alone."""

from __future__ import annotations

import json
import math

import pytest

from lightyear_node.learning.worth import ROUNDS, comparison, weigh
from lightyear_node.types import PairedScores, Served, Worth

BETTER = PairedScores(50, 0.1, 0.09, 0.8)
WORSE = PairedScores(50, -0.1, 0.09, 0.6)
EQUAL = PairedScores(50, 0.0, 0.0, 0.7)
SLIGHTLY_BETTER = PairedScores(50, 0.01, 0.09, 0.7)
SLIGHTLY_WORSE = PairedScores(50, -0.01, 0.09, 0.7)
RATHER_WORSE = PairedScores(50, -0.03, 0.09, 0.7)


def chosen(*rounds: PairedScores) -> Worth:
    worth = None
    for one in rounds:
        worth = weigh(one, worth, "decisions")
    assert worth is not None
    return worth


def test_a_comparison_is_paired() -> None:
    found = comparison([1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0])
    assert (found.samples, found.gain, found.federated) == (4, 0.5, 0.75)
    assert found.variance == pytest.approx(1 / 3)
    assert found.error == pytest.approx(math.sqrt(1 / 12))
    with pytest.raises(ValueError, match="no sample"):
        comparison([], [])


@pytest.mark.parametrize(
    ("rounds", "served"),
    [
        ([EQUAL], Served.ALONE),
        ([BETTER], Served.FEDERATED),
        ([WORSE], Served.ALONE),
        # A gain within half a standard error is no reason to change.
        ([SLIGHTLY_BETTER], Served.ALONE),
        ([BETTER, *[SLIGHTLY_WORSE] * 5], Served.FEDERATED),
        ([BETTER, *[RATHER_WORSE] * 5], Served.ALONE),
        # Good behaviour in earlier rounds does not excuse a harmful newest one.
        ([BETTER, BETTER, BETTER, WORSE], Served.ALONE),
        ([WORSE, WORSE, WORSE, BETTER], Served.ALONE),
        ([WORSE, BETTER, BETTER, BETTER, BETTER], Served.FEDERATED),
    ],
)
def test_the_better_model_is_served(rounds: list[PairedScores], served: Served) -> None:
    assert chosen(*rounds).served is served


def test_only_the_last_rounds_count() -> None:
    worth = chosen(*[WORSE] * 9, *[BETTER] * ROUNDS)
    assert worth.recent == (BETTER,) * ROUNDS
    assert (worth.samples, worth.gain) == (50 * ROUNDS, pytest.approx(0.1))
    assert worth.error == pytest.approx(math.sqrt(0.09 / (50 * ROUNDS)))


def test_a_record_survives_as_json() -> None:
    worth = Worth("loss", (BETTER, WORSE), Served.FEDERATED, {"accuracy": 0.5})
    plain = json.loads(json.dumps(worth.to_plain()))
    assert (plain["gain"], plain["served"]) == (0.0, "federated")
    assert Worth.from_plain(plain) == worth


def test_it_is_described() -> None:
    better = chosen(BETTER)
    assert better.description() == (
        "federated against alone +10 ± 4.2 points, serving the federated model"
    )
    assert (
        "-0.1 ± 0.042 of the loss, serving the one alone"
        in weigh(WORSE, None, "loss").description()
    )
