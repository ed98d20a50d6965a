"""The choice between the federated model and the one trained alone."""

from __future__ import annotations

import json
import math

import pytest

from lightyear_node.learning.decisions import WORST
from lightyear_node.learning.worth import ROUNDS, comparison, weigh
from lightyear_node.types import PairedScores, Served, Worth

BETTER = PairedScores(50, 0.1, 0.09, 0.8)
WORSE = PairedScores(50, -0.1, 0.09, 0.6)
EQUAL = PairedScores(50, 0.0, 0.0, 0.7)
SLIGHTLY_BETTER = PairedScores(50, 0.01, 0.09, 0.7)
SLIGHTLY_WORSE = PairedScores(50, -0.01, 0.09, 0.7)
RATHER_BETTER = PairedScores(50, 0.03, 0.09, 0.7)
RATHER_WORSE = PairedScores(50, -0.03, 0.09, 0.7)


CLEARLY_BETTER = PairedScores(50, 0.07, 0.09, 0.8)
LOWER_LOSS = PairedScores(50, 0.2, 0.5, -0.6)
HIGHER_LOSS = PairedScores(50, -0.1, 0.5, -0.6)


def chosen(*rounds: PairedScores, losses: PairedScores | None = LOWER_LOSS) -> Worth:
    worth = None
    for one in rounds:
        worth = weigh(one, losses, worth)
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


@pytest.mark.parametrize(
    ("rounds", "served"),
    [
        ([RATHER_BETTER], Served.ALONE),
        ([CLEARLY_BETTER], Served.FEDERATED),
        # Being served already is no advantage then.
        ([CLEARLY_BETTER, EQUAL, EQUAL], Served.ALONE),
        ([CLEARLY_BETTER] * 4, Served.FEDERATED),
    ],
)
def test_with_a_higher_loss_decisions_must_be_clearly_better(
    rounds: list[PairedScores], served: Served
) -> None:
    assert chosen(RATHER_BETTER).served is Served.FEDERATED
    assert chosen(*rounds, losses=HIGHER_LOSS).served is served


def test_a_loss_that_overflows_counts_as_higher() -> None:
    overflown = comparison([-0.1] * 49 + [WORST], [-0.5] * 50)
    assert chosen(RATHER_BETTER, losses=overflown).served is Served.ALONE


def test_losses_are_enough_where_labels_are_no_decisions() -> None:
    found = chosen(BETTER, losses=None)
    assert (found.unit, found.losses, found.served) == ("loss", (), Served.FEDERATED)


def test_only_the_last_rounds_count() -> None:
    worth = chosen(*[WORSE] * 9, *[BETTER] * ROUNDS)
    assert worth.recent == (BETTER,) * ROUNDS
    assert (worth.samples, worth.gain) == (50 * ROUNDS, pytest.approx(0.1))
    assert worth.error == pytest.approx(math.sqrt(0.09 / (50 * ROUNDS)))


def test_a_record_survives_as_json() -> None:
    worth = Worth(
        "decisions", (BETTER, WORSE), Served.FEDERATED, {"accuracy": 0.5}, (LOWER_LOSS, HIGHER_LOSS)
    )
    plain = json.loads(json.dumps(worth.to_plain()))
    assert (plain["gain"], plain["served"]) == (0.0, "federated")
    assert Worth.from_plain(plain) == worth


def test_it_is_described() -> None:
    better = chosen(BETTER)
    assert better.description() == (
        "federated against alone +10 ± 4.2 points, serving the federated model"
    )
    assert (
        "-0.1 ± 0.042 of the loss, serving the one alone" in weigh(WORSE, None, None).description()
    )
