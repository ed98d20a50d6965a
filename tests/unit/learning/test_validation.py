"""Validation measures agreement and loss in the same forward pass."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightyear_node.learning import Validation, ValidationResult, exchanged, ntk_agreement


def measured(
    model: nn.Module, batches: list[Any], **options: Any
) -> tuple[Validation, ValidationResult]:
    validation = Validation(model, batches, **options)
    validation.set_reference(exchanged(model))
    return validation, validation.measure(exchanged(model))


def test_agreement_and_loss_of_a_peer(digits: Any) -> None:
    ours, theirs = digits.sites[0], digits.sites[1]
    validation = Validation(ours.model, ours.batches)
    validation.set_reference(ours.weights)
    result = validation.measure(theirs.weights)
    assert result.agreement == ntk_agreement(ours.model, theirs.model, ours.batches)
    theirs.model.eval()
    x, y = (torch.cat(parts) for parts in zip(*ours.batches, strict=True))
    with torch.no_grad():
        expected = functional.cross_entropy(theirs.model(x), y)
    theirs.model.train()
    assert result.loss == pytest.approx(float(expected), rel=1e-5)  # uneven batches, true mean
    assert validation.own_loss is not None
    assert validation.chance.level == pytest.approx(math.log(10))


def test_one_forward_pass_per_peer(digits: Any) -> None:
    site = digits.sites[0]
    rows: list[int] = []

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = site.model

        def forward(self, x: Tensor) -> Tensor:
            rows.append(len(x))
            logits: Tensor = self.inner(x)
            return logits

    model = Counting()
    validation = Validation(model, site.batches)
    validation.set_reference(exchanged(model))
    rows.clear()
    validation.measure(exchanged(model))
    assert sum(rows) == sum(len(x) for x, _ in site.batches)


def test_the_users_model_is_not_changed(digits: Any) -> None:
    site = digits.sites[0]
    before = {name: tensor.clone() for name, tensor in site.weights.items()}
    validation = Validation(site.model, site.batches)
    validation.set_reference(digits.sites[1].weights)
    validation.measure(digits.sites[2].weights)
    assert all(torch.equal(exchanged(site.model)[name], t) for name, t in before.items())


def test_tensors_that_are_not_exchanged_stay_local(normalised_digits: Any) -> None:
    """Peers are scored with our own statistics if an exclude pattern keeps them local."""
    ours, theirs = normalised_digits.sites[:2]
    validation = Validation(ours.model, ours.batches)
    validation.set_reference(ours.weights)
    mixture = {**theirs.weights, **{n: t for n, t in ours.weights.items() if "running" in n}}
    part = {name: t for name, t in theirs.weights.items() if "running" not in name}
    assert validation.measure(part) == validation.measure(mixture)
    assert validation.measure(theirs.weights) != validation.measure(mixture)


def zeros(*shape: int) -> nn.Module:
    """A network whose logits are all zero: every loss is the chance loss."""
    channels = shape[0]
    model = nn.Conv2d(1, channels, 1) if len(shape) > 1 else nn.Linear(5, channels)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(model)


def pixels(classes: int, *shape: int) -> Tensor:
    return torch.randint(classes, shape)


@pytest.mark.parametrize(
    ("model", "x", "y", "classes"),
    [
        (zeros(4), torch.randn(6, 5), pixels(4, 6), 4),
        (zeros(3, 2), torch.randn(6, 1, 4, 4), pixels(3, 6, 4, 4), 3),  # per pixel
        (zeros(3, 2), torch.randn(6, 1, 4, 4), pixels(3, 6, 1, 4, 4), 3),  # masks with a channel
        (zeros(1), torch.randn(6, 5), pixels(2, 6), 2),  # one logit
        (zeros(1), torch.randn(6, 5), pixels(2, 6, 1).float(), 2),
        (zeros(1, 2), torch.randn(6, 1, 4, 4), pixels(2, 6, 1, 4, 4) == 1, 2),
        (zeros(4), torch.randn(6, 5), pixels(2, 6, 4).float(), 2),  # several labels at once
    ],
)
def test_the_chance_loss_is_the_log_of_the_number_of_classes(
    model: nn.Module, x: Tensor, y: Tensor, classes: int
) -> None:
    batches = list(zip(torch.split(x, 4), torch.split(y, 4), strict=True))
    validation, result = measured(model, batches)
    assert validation.chance.level == pytest.approx(math.log(classes))
    assert validation.own_loss == pytest.approx(math.log(classes))
    assert result.loss == pytest.approx(math.log(classes))


def test_pixels_without_a_label_are_ignored() -> None:
    y = pixels(3, 6, 4, 4)
    y[:, 0] = -100
    validation, _ = measured(zeros(3, 2), [(torch.randn(6, 1, 4, 4), y)])
    assert validation.own_loss == pytest.approx(math.log(3))


def test_other_labels_are_measured_with_the_tasks_loss() -> None:
    x, y = torch.randn(6, 5), 3 + torch.rand(6, 1)
    batches = list(zip(torch.split(x, 4), torch.split(y, 4), strict=True))
    validation, _ = measured(zeros(1), batches, loss=functional.mse_loss)
    assert validation.own_loss == pytest.approx(float(y.square().mean()))
    assert validation.chance.level == pytest.approx(float(y.var(unbiased=False)), rel=1e-4)
    with pytest.raises(ValueError, match="loss"):
        measured(zeros(1), batches)


def test_class_indices_outside_the_logits_use_the_tasks_loss() -> None:
    """255 for "no label", as in many segmentation datasets."""
    y = pixels(3, 6, 4, 4)
    y[:, 0] = 255

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits, labels, ignore_index=255)

    validation, _ = measured(zeros(3, 2), [(torch.randn(6, 1, 4, 4), y)], loss=loss)
    assert validation.own_loss == pytest.approx(math.log(3))
    shares = torch.bincount(y[:, 1:].flatten()) / y[:, 1:].numel()
    assert validation.chance.level == pytest.approx(float(-(shares * shares.log()).sum()), rel=1e-3)


@pytest.mark.parametrize(
    ("loss", "logits"),
    [
        (functional.binary_cross_entropy_with_logits, True),
        (functional.mse_loss, False),
        (functional.l1_loss, False),
        (functional.binary_cross_entropy, True),  # raises for outputs outside of [0, 1]
    ],
)
@pytest.mark.parametrize("labels", [torch.rand(6, 1), pixels(2, 6, 1).float()])
def test_targets_between_0_and_1_are_labels_if_the_loss_takes_logits(
    loss: Any, logits: bool, labels: Tensor
) -> None:
    validation, _ = measured(zeros(1), [(torch.randn(6, 5), labels)], loss=loss)
    assert validation.chance.measured is not logits
    guessing = math.log(2) if logits else float(loss(torch.zeros(6, 1), labels))
    assert validation.own_loss == pytest.approx(guessing)


def test_the_loss_of_guessing_does_not_depend_on_later_models() -> None:
    model, x, y = zeros(1), torch.randn(8, 5), torch.randn(8, 1)
    validation, _ = measured(model, [(x, y)], loss=functional.mse_loss)
    before = validation.chance
    for scale in (1e3, 1e30, math.nan):
        weights = {name: torch.full_like(t, scale) for name, t in exchanged(model).items()}
        validation.measure(weights)
        validation.set_reference(weights)
    assert validation.chance == before


def test_a_head_without_a_closed_form_also_has_a_loss() -> None:
    model = nn.Sequential(zeros(4), nn.Softmax(dim=1))
    validation, result = measured(model, [(torch.randn(6, 5), pixels(4, 6))])
    assert validation.own_loss == pytest.approx(math.log(4))
    assert result.loss == validation.own_loss


def test_a_validation_needs_a_reference_and_batches() -> None:
    with pytest.raises(ValueError, match="no batches"):
        Validation(zeros(4), [])
    with pytest.raises(ValueError, match="set_reference"):
        Validation(zeros(4), [torch.randn(6, 5)]).measure(exchanged(zeros(4)))
