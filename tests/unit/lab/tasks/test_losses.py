"""Losses and metrics against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightyear_node.lab.tasks.losses import Dice, WeightedFocalLoss, accuracy, binary_accuracy

HALF_AND_THREE_QUARTERS = torch.tensor([[0.0, 0.0], [0.0, math.log(3)]])
"""Logits that give class 1 the probabilities 1/2 and 3/4."""


def test_focal_loss_equals_a_value_computed_by_hand() -> None:
    loss = WeightedFocalLoss(torch.tensor([2.0, 10.0]))
    # w (1 − p)² (−ln p): class 0 with p = 1/2, class 1 with p = 3/4
    by_hand = (2 * 0.25 * math.log(2) + 10 * (1 / 16) * math.log(4 / 3)) / 2
    assert float(loss(HALF_AND_THREE_QUARTERS, torch.tensor([0, 1]))) == pytest.approx(by_hand)


def test_focal_loss_without_focus_is_cross_entropy() -> None:
    logits, target = torch.randn(50, 8), torch.randint(8, (50,))
    even = WeightedFocalLoss(torch.ones(8), gamma=0)
    assert float(even(logits, target)) == pytest.approx(
        float(functional.cross_entropy(logits, target)), rel=1e-6
    )
    weights = torch.rand(8) + 0.1
    each = functional.cross_entropy(logits, target, weight=weights, reduction="none")
    weighted = WeightedFocalLoss(weights, gamma=0)
    assert float(weighted(logits, target)) == pytest.approx(float(each.mean()), rel=1e-6)


def test_focal_loss_is_finite_for_a_confident_network() -> None:
    logits = torch.tensor([[200.0, 0.0], [200.0, 0.0]], requires_grad=True)
    loss = WeightedFocalLoss(torch.ones(2))(logits, torch.tensor([0, 1]))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(100)
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_accuracy_is_the_share_of_correct_samples() -> None:
    assert accuracy(torch.eye(4), torch.tensor([0, 1, 2, 0])) == 0.75


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_binary_accuracy_ignores_a_trailing_dimension(shape: tuple[int, ...]) -> None:
    logits = torch.tensor([0.1, -3.0, 2.0, -0.1]).reshape(shape)
    assert binary_accuracy(logits, torch.tensor([1.0, 0.0, 0.0, 1.0]).reshape(shape)) == 0.5
    # (4,) against (4, 1) must not broadcast to 16 comparisons
    assert binary_accuracy(logits, torch.tensor([1.0, 0.0, 1.0, 0.0])) == 1.0


def logits_of(mask: Tensor) -> Tensor:
    """Logits (n, 2, h, w) whose argmax is the mask (n, h, w)."""
    return torch.stack([1 - mask, mask], dim=1).float()


EMPTY = torch.zeros(1, 2, 2, dtype=torch.long)
LEFT = torch.tensor([[[1, 0], [1, 0]]])
TOP = torch.tensor([[[1, 1], [0, 0]]])
ALL = torch.ones(1, 2, 2, dtype=torch.long)


@pytest.mark.parametrize(
    ("found", "truth", "expected"),
    [
        (LEFT, LEFT, 1.0),
        (LEFT, 1 - LEFT, 0.0),
        (LEFT, TOP, 0.5),
        (ALL, LEFT, 2 * 2 / 6),
        (EMPTY, EMPTY, 1.0),
        (EMPTY, LEFT, 0.0),
        (LEFT, EMPTY, 0.0),
    ],
)
def test_dice_equals_a_value_computed_by_hand(
    found: Tensor, truth: Tensor, expected: float
) -> None:
    dice = Dice()
    dice.update(logits_of(found), truth)
    assert dice.compute() == pytest.approx(expected)


def test_dice_is_the_mean_over_images_however_they_are_batched() -> None:
    found, truth = torch.cat([LEFT, ALL, LEFT]), torch.cat([TOP, LEFT, LEFT])
    dice = Dice()
    for rows in (slice(0, 2), slice(2, 3)):
        dice.update(logits_of(found[rows]), truth[rows])
    assert dice.compute() == pytest.approx((0.5 + 2 / 3 + 1) / 3)
    dice.reset()
    assert math.isnan(dice.compute())
    dice.update(logits_of(LEFT), TOP)
    assert dice.compute() == 0.5
