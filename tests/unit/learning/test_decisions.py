"""Scores of decisions: known answers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightyear_node.learning import Validation
from lightyear_node.learning.decisions import (
    WORST,
    binary_losses,
    binary_scores,
    class_losses,
    class_scores,
)

IGNORED = -100


def masks(*labels: list[int]) -> Tensor:
    return torch.tensor(labels)[:, None, :]  # (n, 1, pixels) → rows of one line


def test_classes_are_right_or_wrong() -> None:
    logits = torch.tensor([[2.0, 1, 0], [0, 1, 2], [0, 3, 1]])
    assert class_scores(logits, torch.tensor([0, 1, 1]), IGNORED).tolist() == [1, 0, 1]
    assert class_scores(logits, torch.tensor([0, IGNORED, 1]), IGNORED).tolist() == [1, 1]


def test_masks_are_scored_by_the_dice_of_each_class() -> None:
    y = masks([0, 0, 1, 1], [0, 0, 0, 0])
    chosen = masks([0, 1, 1, 1], [0, 0, 0, 0])
    logits = functional.one_hot(chosen, 2).movedim(-1, 1).float()
    background, lung = 2 * 1 / (2 + 1), 2 * 2 / (2 + 3)
    found = class_scores(logits, y, IGNORED)
    assert found.tolist() == pytest.approx([(background + lung) / 2, 1.0])
    # A model that says background everywhere is not good because most pixels are background.
    y = masks([0] * 9 + [1])
    nothing = functional.one_hot(masks([0] * 10), 2).movedim(-1, 1).float()
    assert float(class_scores(nothing, y, IGNORED)) < 0.5


def test_labels_of_zero_and_one_are_scored_by_their_side() -> None:
    logits = torch.tensor([[1.0], [-1.0], [2.0]])
    assert binary_scores(logits, torch.tensor([[1.0], [1.0], [0.0]])).tolist() == [1, 0, 0]
    several = torch.tensor([[1.0, -1.0, 1.0, 1.0]])
    assert binary_scores(several, torch.tensor([[1.0, 0.0, 0.0, 1.0]])).tolist() == [0.75]
    assert binary_scores(torch.tensor([1.0, -1.0]), torch.tensor([1.0, 1.0])).tolist() == [1, 0]
    mask = torch.tensor([[[[1.0, 1.0, -1.0, -1.0]]]])
    there = torch.tensor([[[[1.0, 0.0, 0.0, 0.0]]]])
    assert binary_scores(mask, there).tolist() == pytest.approx([2 / 3])


def test_losses_are_those_of_each_sample() -> None:
    """Their mean is torch's loss, if all samples have as many labels."""
    torch.manual_seed(0)
    logits, y = torch.randn(6, 3), torch.tensor([0, 1, IGNORED, 2, 0, 1])
    known = y != IGNORED
    found = class_losses(logits, y, IGNORED)
    assert len(found) == 5
    assert -float(found.mean()) == pytest.approx(
        float(functional.cross_entropy(logits[known], y[known])), abs=1e-6
    )
    pixels, masks = torch.randn(4, 2, 5, 5), torch.randint(0, 2, (4, 5, 5))
    assert class_losses(pixels, masks, IGNORED).shape == (4,)
    expected = float(functional.cross_entropy(pixels, masks))
    assert -float(class_losses(pixels, masks, IGNORED).mean()) == pytest.approx(expected, abs=1e-6)
    masks[0] = IGNORED  # an image without labels has no loss
    assert float(class_losses(pixels, masks, IGNORED)[0]) == 0
    bits, signs = torch.randn(6, 4), torch.randint(0, 2, (6, 4)).float()
    expected = float(functional.binary_cross_entropy_with_logits(bits, signs))
    assert -float(binary_losses(bits, signs).mean()) == pytest.approx(expected, abs=1e-6)
    assert binary_losses(bits[:, 0], signs[:, 0]).shape == (6,)


def test_a_regression_is_scored_by_the_loss_of_groups() -> None:
    x = torch.arange(20.0)[:, None]
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(2.0)
    validation = Validation(model, [(x, x)], loss=functional.mse_loss)
    validation.set_reference(model.state_dict())
    scores = validation.scores_of(model)
    assert scores.decisions.tolist() == pytest.approx([-4.0] * 2)  # groups of 8 and 12
    assert scores.losses is None
    with torch.no_grad():
        model.bias.fill_(float("nan"))
    assert validation.scores_of(model).decisions.tolist() == [WORST] * 2


def test_a_loss_that_needs_the_whole_batch_gets_it() -> None:
    x = torch.arange(20.0)[:, None]
    model = nn.Linear(1, 1)

    def loss(output: Tensor, y: Tensor) -> Tensor:
        if len(y) < 20:
            raise ValueError("too few samples")
        return functional.mse_loss(output, y)

    validation = Validation(model, [(x, x)], loss=loss)
    validation.set_reference(model.state_dict())
    expected = -float(functional.mse_loss(model(x), x).detach())
    assert validation.scores_of(model).decisions.tolist() == pytest.approx([expected])


def test_a_subset_measures_its_samples_with_the_same_chance_level() -> None:
    x, y = torch.eye(4), torch.tensor([0, 1, 0, 1])
    model = nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0, 0, 1], [0, 1, 1, 0]]))
    validation = Validation(model, [(x[:2], y[:2]), (x[2:], y[2:])])
    validation.set_reference(model.state_dict())
    assert validation.scores_of(model).decisions.tolist() == [1, 1, 0, 0]
    assert validation.scores_of(model).losses is not None
    part = validation.subset([1, 2])
    assert part.scores_of(model).decisions.tolist() == [1, 0]
    assert part.chance == validation.chance
    losses = [
        validation.subset([one]).loss_of(model.state_dict(), own_statistics=False) for one in (1, 2)
    ]
    expected = sum(loss for loss in losses if loss is not None) / 2
    assert part.loss_of(model.state_dict(), own_statistics=False) == pytest.approx(expected)
