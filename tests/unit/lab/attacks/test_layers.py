"""Attacks on single layers: what they change, what they keep, what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightyear_node import Task
from lightyear_node.errors import InvalidTask
from lightyear_node.lab.attacks.layers import clipped_bias, layer_swap, rescale
from lightyear_node.learning.guard import DistanceLimits
from tests.support import tiny_task
from tests.support.recorded_attacks import A, context_of, equal, network_with


def task_of(*layers: nn.Module) -> Task:
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    return Task(
        model=lambda: nn.Sequential(*layers),
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        train_data=[],
        val_data=[(inputs, torch.zeros(8, 1))],
    )


def random_weights(task: Task, seed: int) -> dict[str, Tensor]:
    assert not isinstance(task.model, nn.Module)
    generator = torch.Generator().manual_seed(seed)
    state = task.model().state_dict()
    return {
        name: torch.rand(tensor.shape, generator=generator) + 0.1
        for name, tensor in state.items()
        if tensor.is_floating_point()
    }


TINY = tiny_task.build()
UPDATE, OTHER = random_weights(TINY, 1), random_weights(TINY, 2)


@pytest.mark.parametrize("target", [0, 2])
def test_the_bias_of_one_class_is_raised_to_the_limit(target: int) -> None:
    context = context_of(UPDATE, task=TINY, honest={A: OTHER}, round=1)
    sent = clipped_bias(UPDATE, context, target=target)
    assert all(torch.equal(sent[name], UPDATE[name]) for name in UPDATE if name != "3.bias")
    shift = sent["3.bias"] - OTHER["3.bias"]
    assert [bool(value) for value in shift] == [index == target for index in range(3)]
    limits = DistanceLimits.of(OTHER)
    allowed = limits.scales["3.bias"] * limits.limits["3.bias"]
    assert float(shift[target]) == pytest.approx(0.95 * allowed)


def test_of_a_single_logit_class_0_lowers_the_bias() -> None:
    task = task_of(nn.Linear(6, 1))
    update, other = random_weights(task, 1), random_weights(task, 2)
    context = context_of(update, task=task, honest={A: other})
    assert clipped_bias(update, context, target=0)["0.bias"] < other["0.bias"]
    assert clipped_bias(update, context, target=1)["0.bias"] > other["0.bias"]
    with pytest.raises(InvalidTask, match="there are 2 classes"):
        clipped_bias(update, context, target=2)


def test_a_head_without_bias_is_refused() -> None:
    task = task_of(nn.Linear(6, 3, bias=False))
    update = random_weights(task, 1)
    with pytest.raises(InvalidTask, match="no bias"):
        clipped_bias(update, context_of(update, task=task, honest={A: update}))


def test_swapped_outputs_exchange_the_classes() -> None:
    sent = layer_swap(UPDATE, context_of(UPDATE, task=TINY))
    x = torch.randn(5, 6)
    before, after = network_with(TINY, UPDATE)(x), network_with(TINY, sent)(x)
    torch.testing.assert_close(after, before.roll(1, 1))
    named = layer_swap(UPDATE, context_of(UPDATE, task=TINY), layer="0", shift=2)
    assert torch.equal(named["0.weight"], UPDATE["0.weight"].roll(2, 0))
    assert torch.equal(named["3.weight"], UPDATE["3.weight"])


def test_a_layer_with_one_row_has_its_columns_exchanged() -> None:
    task = task_of(nn.Linear(6, 1))
    update = random_weights(task, 1)
    sent = layer_swap(update, context_of(update, task=task))
    assert torch.equal(sent["0.weight"], update["0.weight"].roll(1, 1))
    assert torch.equal(sent["0.bias"], update["0.bias"])


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)),
        (nn.Linear(6, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 5), nn.LeakyReLU(),
         nn.Linear(5, 1)),
        (nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(),
         nn.Linear(4, 2)),
    ],
)  # fmt: skip
def test_rescaling_changes_the_weights_but_not_the_function(layers: tuple[nn.Module, ...]) -> None:
    task = task_of(*layers)
    update = random_weights(task, 3)
    sent = rescale(update, context_of(update, task=task), factor=3.0)
    assert not equal(sent, update)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))
    before, after = (network_with(task, one)(x).clone() for one in (update, sent))
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize(
    "layers", [(nn.Linear(6, 1),), (nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))]
)
def test_a_network_that_cannot_be_rescaled_is_refused(layers: tuple[nn.Module, ...]) -> None:
    task = task_of(*layers)
    update = random_weights(task, 1)
    with pytest.raises(InvalidTask, match="no two layers in a row") as caught:
        rescale(update, context_of(update, task=task))
    assert "nn.Sequential" in (caught.value.hint or "")
