"""The loss of guessing and the unit, measured for losses of many kinds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightyear_node.learning.chance import Chance, measure_chance
from tests.support import loss_tasks

ROWS = 120
Loss = Callable[[Any, Any], Tensor]


def measured(loss: Loss, labels: Any, outputs: Any = None, *, batches: int = 3) -> Chance:
    """With outputs of an untrained network, near zero; in batches of equal size."""
    if outputs is None:
        outputs = 0.1 * torch.randn(ROWS, 1)
    size = ROWS // batches
    pieces = [(_rows(outputs, at, size), _rows(labels, at, size)) for at in range(0, ROWS, size)]
    start = sum(float(loss(output, label)) for output, label in pieces) / batches
    return measure_chance(loss, [one for one, _ in pieces], [one for _, one in pieces], start)


def _rows(value: Any, at: int, size: int) -> Any:
    if isinstance(value, Tensor):
        return value[at : at + size]
    if isinstance(value, dict):
        return {key: _rows(item, at, size) for key, item in value.items()}
    return tuple(_rows(item, at, size) for item in value)


@pytest.mark.parametrize(("mean", "deviation"), [(0, 1), (3000, 500), (-1e6, 10), (0.5, 1e-3)])
def test_squared_errors_are_measured_in_variances(mean: float, deviation: float) -> None:
    y = mean + deviation * torch.randn(ROWS, 1)
    found = measured(functional.mse_loss, y)
    assert found.level == pytest.approx(float(y.double().var(unbiased=False)), rel=0.02)
    # Two values, the means above and below the mean, explain 2/π of a normal distribution.
    assert found.unit / found.level == pytest.approx(2 / math.pi, rel=0.15)


@pytest.mark.parametrize(("mean", "deviation"), [(0, 1), (3000, 500)])
def test_absolute_errors_are_measured_from_the_median(mean: float, deviation: float) -> None:
    y = mean + deviation * torch.randn(ROWS, 1).exp()
    found = measured(functional.l1_loss, y)
    assert found.level == pytest.approx(float((y - y.median()).abs().mean()), rel=0.01)
    assert 0 < found.unit < found.level


@pytest.mark.parametrize("factor", [1e-4, 1.0, 1e5])
@pytest.mark.parametrize("offset", [0.0, -20.0, 20.0])
def test_the_unit_follows_a_factor_and_ignores_an_offset_of_the_loss(
    factor: float, offset: float
) -> None:
    y = torch.randn(ROWS, 1)
    plain = measured(functional.mse_loss, y)
    found = measured(lambda z, y: factor * (functional.mse_loss(z, y) + offset), y)
    assert found.level == pytest.approx(factor * (plain.level + offset), rel=1e-3)
    assert found.unit == pytest.approx(factor * plain.unit, rel=0.01)


@pytest.mark.parametrize("batches", [1, 3])
def test_guessing_means_equal_risks_for_a_partial_likelihood(batches: int) -> None:
    time, rows = torch.rand(ROWS), ROWS // batches
    y = torch.stack([time, torch.ones(ROWS)], 1)
    found = measured(loss_tasks.cox_loss, y, batches=batches)
    assert found.level == pytest.approx(math.lgamma(rows + 1) / rows, rel=1e-3)  # mean of ln k
    assert found.unit == pytest.approx(math.log(2), rel=0.35)  # one bit, for any number of rows


def test_guessing_means_equal_similarities_for_a_contrastive_loss() -> None:
    """Both views are outputs, so all slopes vanish at a constant and the level is the unit."""

    def loss(pair: Tensor, _: Any) -> Tensor:
        first, second = functional.normalize(pair, dim=1).chunk(2)
        return functional.cross_entropy(first @ second.T / 0.1, torch.arange(len(first)))

    found = measured(loss, torch.zeros(ROWS), torch.randn(ROWS, 8))
    guessing = math.log(ROWS / 3 / 2)
    assert found.level == pytest.approx(guessing, rel=1e-3)
    assert 0.1 * guessing < found.unit <= guessing * 1.001


def test_a_loss_below_zero_has_a_positive_unit() -> None:
    masks = (torch.rand(ROWS, 16) < 0.25).float()
    found = measured(loss_tasks.dice_minus_one, {"mask": masks}, 0.1 * torch.randn(ROWS, 16))
    everything = 2 * 0.25 / 1.25  # the Dice score of a mask that covers everything
    assert found.level == pytest.approx(-everything, abs=0.05)
    assert found.unit == pytest.approx(1 + found.level, abs=0.02)


def test_a_loss_without_a_lower_bound_has_a_finite_unit() -> None:
    y = torch.randn(ROWS, 1)
    found = measured(loss_tasks.gaussian_nll, y, 0.1 * torch.randn(ROWS, 2))
    assert found.level == pytest.approx((1 + math.log(float(y.var(unbiased=False)))) / 2, abs=0.01)
    assert 0.2 < found.unit < 2


def test_outputs_of_other_samples_are_the_level_if_a_constant_output_has_no_loss() -> None:
    y, outputs = torch.randn(ROWS, 1), torch.randn(ROWS, 1)
    informed = measured(loss_tasks.one_minus_correlation, y, y + outputs)
    assert informed.level == pytest.approx(1, abs=0.15)  # no correlation
    assert 0.3 < informed.unit < 1.2

    def refusing(output: Tensor, target: Tensor) -> Tensor:
        if float(output.detach().std()) < 1e-3:
            raise ValueError("all outputs are equal")
        return functional.mse_loss(output, target)

    found = measured(refusing, y, outputs)
    assert found.level == pytest.approx(2, rel=0.3)  # the sum of two variances


@pytest.mark.parametrize("target", [0.0, 5.0])
def test_equal_targets_still_have_a_positive_unit(target: float) -> None:
    found = measured(functional.mse_loss, torch.full((ROWS, 1), target))
    assert found.level == pytest.approx(0, abs=1e-3)
    assert found.unit > 0
    exact = measured(functional.mse_loss, torch.zeros(ROWS, 1), torch.zeros(ROWS, 1))
    assert (exact.level, exact.unit) == (0, 1)  # nothing to measure with


class Heads(NamedTuple):
    value: Tensor
    spread: Tensor


@dataclass
class Answer:
    value: Tensor
    spread: Tensor
    count: int = 1


@pytest.mark.parametrize(
    ("form", "loss"),
    [
        (lambda a, b: (a, b), lambda z, y: functional.mse_loss(z[0], y)),
        (lambda a, b: [a, b], lambda z, y: functional.mse_loss(z[0], y)),
        (lambda a, b: {"value": a, "rest": b}, lambda z, y: functional.mse_loss(z["value"], y)),
        (Heads, lambda z, y: functional.mse_loss(z.value, y)),
        (Answer, lambda z, y: functional.mse_loss(z.value, y)),
    ],
)
def test_outputs_may_be_nested(form: Callable[[Tensor, Tensor], Any], loss: Loss) -> None:
    y = 40 + torch.randn(ROWS, 1)
    output = form(torch.zeros(ROWS, 1), torch.zeros(ROWS, 3, 2, 2))
    found = measure_chance(loss, [output], [y], float(loss(output, y)))
    assert found.level == pytest.approx(float(y.var(unbiased=False)), rel=1e-3)


def test_outputs_without_a_channel_dimension() -> None:
    y = 7 + torch.randn(ROWS)
    found = measured(functional.mse_loss, y, torch.zeros(ROWS))
    assert found.level == pytest.approx(float(y.var(unbiased=False)), rel=1e-3)


def test_the_result_is_deterministic_and_leaves_the_outputs_alone() -> None:
    y, outputs = torch.randn(ROWS, 3), torch.randn(ROWS, 3)
    before = outputs.clone()
    assert measured(functional.mse_loss, y, outputs) == measured(functional.mse_loss, y, outputs)
    assert torch.equal(outputs, before)
    assert not outputs.requires_grad
