"""What a probe measures: agreement and loss from the same forward pass."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightyear_node.learning import Measured, Probe, exchanged, ntk_agreement


def measured(model: nn.Module, batches: list[Any], **options: Any) -> tuple[Probe, Measured]:
    probe = Probe(model, batches, **options)
    probe.anchor(exchanged(model))
    return probe, probe.measure(exchanged(model))


def test_agreement_and_loss_of_a_peer(digits: Any) -> None:
    ours, theirs = digits.sites[0], digits.sites[1]
    probe = Probe(ours.model, ours.batches)
    probe.anchor(ours.weights)
    result = probe.measure(theirs.weights)
    assert result.agreement == ntk_agreement(ours.model, theirs.model, ours.batches)
    theirs.model.eval()
    x, y = (torch.cat(parts) for parts in zip(*ours.batches, strict=True))
    with torch.no_grad():
        expected = functional.cross_entropy(theirs.model(x), y)
    theirs.model.train()
    assert result.loss == pytest.approx(float(expected), rel=1e-5)  # uneven batches, true mean
    assert probe.own_loss is not None
    assert probe.chance_loss == pytest.approx(math.log(10))


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
    probe = Probe(model, site.batches)
    probe.anchor(exchanged(model))
    rows.clear()
    probe.measure(exchanged(model))
    assert sum(rows) == sum(len(x) for x, _ in site.batches)


def test_the_users_model_is_not_touched(digits: Any) -> None:
    site = digits.sites[0]
    before = {name: tensor.clone() for name, tensor in site.weights.items()}
    probe = Probe(site.model, site.batches)
    probe.anchor(digits.sites[1].weights)
    probe.measure(digits.sites[2].weights)
    assert all(torch.equal(exchanged(site.model)[name], t) for name, t in before.items())


def test_tensors_that_are_not_exchanged_stay_local(normalised_digits: Any) -> None:
    """Scored with our own statistics where an exclude pattern keeps them at home."""
    ours, theirs = normalised_digits.sites[:2]
    probe = Probe(ours.model, ours.batches)
    probe.anchor(ours.weights)
    mixture = {**theirs.weights, **{n: t for n, t in ours.weights.items() if "running" in n}}
    part = {name: t for name, t in theirs.weights.items() if "running" not in name}
    assert probe.measure(part) == probe.measure(mixture)
    assert probe.measure(theirs.weights) != probe.measure(mixture)


def zeros(*shape: int) -> nn.Module:
    """A network whose logits are all zero, so that every loss is that of guessing."""
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
def test_guessing_costs_ln_c(model: nn.Module, x: Tensor, y: Tensor, classes: int) -> None:
    batches = list(zip(torch.split(x, 4), torch.split(y, 4), strict=True))
    probe, result = measured(model, batches)
    assert probe.chance_loss == pytest.approx(math.log(classes))
    assert probe.own_loss == pytest.approx(math.log(classes))
    assert result.loss == pytest.approx(math.log(classes))


def test_pixels_without_a_label_do_not_count() -> None:
    y = pixels(3, 6, 4, 4)
    y[:, 0] = -100
    probe, _ = measured(zeros(3, 2), [(torch.randn(6, 1, 4, 4), y)])
    assert probe.own_loss == pytest.approx(math.log(3))


def test_other_labels_are_measured_with_the_tasks_loss() -> None:
    x, y = torch.randn(6, 5), 3 + torch.rand(6, 1)
    batches = list(zip(torch.split(x, 4), torch.split(y, 4), strict=True))
    probe, _ = measured(zeros(1), batches, loss=functional.mse_loss)
    assert probe.own_loss == pytest.approx(float(y.square().mean()))
    assert probe.chance_loss == pytest.approx(math.log(2))
    with pytest.raises(ValueError, match="loss"):
        measured(zeros(1), batches)


def test_class_numbers_outside_the_logits_are_left_to_the_tasks_loss() -> None:
    """255 for "no label", as many segmentation sets have it."""
    y = pixels(3, 6, 4, 4)
    y[:, 0] = 255

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits, labels, ignore_index=255)

    probe, _ = measured(zeros(3, 2), [(torch.randn(6, 1, 4, 4), y)], loss=loss)
    assert probe.own_loss == pytest.approx(math.log(3))
    assert probe.chance_loss == pytest.approx(math.log(3))


def test_a_head_without_a_closed_form_delivers_its_loss_too() -> None:
    model = nn.Sequential(zeros(4), nn.Softmax(dim=1))
    probe, result = measured(model, [(torch.randn(6, 5), pixels(4, 6))])
    assert probe.own_loss == pytest.approx(math.log(4))
    assert result.loss == probe.own_loss


def test_a_probe_must_be_anchored_and_have_batches() -> None:
    with pytest.raises(ValueError, match="no batches"):
        Probe(zeros(4), [])
    with pytest.raises(ValueError, match="anchor"):
        Probe(zeros(4), [torch.randn(6, 5)]).measure(exchanged(zeros(4)))
