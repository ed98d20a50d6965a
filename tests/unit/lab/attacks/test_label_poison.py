"""Attacks by wrong labels: what is trained on, and how far models move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightyear_node.errors import InvalidTask, TaskFailed
from lightyear_node.lab.attacks.label_poison import boiling_frog, targeted_flip
from lightyear_node.lab.attacks.weights_math import difference, norm
from lightyear_node.learning.guard import DistanceLimits
from lightyear_node.worker.task import Task
from lightyear_node.worker.training import split_batch
from tests.support import tiny_task
from tests.support.recorded_attacks import (
    SPEC,
    B,
    context_of,
    copied,
    named,
    network_with,
    recorded,
)

TINY = tiny_task.build()


def labels_trained_on(task: Task, **options: Any) -> Iterator[Tensor]:
    """The labels that `targeted-flip` passes to the training."""
    given: list[Task] = []

    def train(changed: Task) -> dict[str, Tensor]:
        given.append(changed)
        return {}

    targeted_flip({}, context_of({}, task=task, train=train), **options)
    [changed] = given
    for batch in changed.train_data:
        yield split_batch(changed, batch)[1]


def test_only_labels_of_the_source_class_change() -> None:
    task = replace(TINY, train_data=[(torch.zeros(4, 6), torch.tensor([0, 1, 2, 1]))])
    assert [y.tolist() for y in labels_trained_on(task)] == [[0, 0, 2, 0]]
    assert [y.tolist() for y in labels_trained_on(task, source=2, target=1)] == [[0, 1, 1, 1]]
    binary = replace(TINY, train_data=[(torch.zeros(2, 6), torch.tensor([[1.0], [0.0]]))])
    assert [y.tolist() for y in labels_trained_on(binary)] == [[[0.0], [0.0]]]


def test_labels_that_are_no_classes_are_refused() -> None:
    task = replace(TINY, train_data=[(torch.zeros(2, 6), torch.tensor([0.5, 2.0]))])
    with pytest.raises(InvalidTask, match="not class indices"):
        list(labels_trained_on(task))
    own = replace(TINY, train_round=lambda model, optimizer, device: None)
    with pytest.raises(TaskFailed, match="`train_round` cannot be changed"):
        list(labels_trained_on(own))


def test_a_model_trained_on_a_targeted_flip_avoids_the_source_class() -> None:
    task = SPEC.task.model_copy(update={"args": {"samples": 600}})
    recorder = recorded({"flip": named("targeted-flip")}, rounds=1, task=task)
    seen = recorder.seen[B, 0]
    x = torch.cat([x for x, _ in seen.context.task.val_data])

    def answers(weights: dict[str, Tensor]) -> int:
        found = network_with(seen.context.task, weights)(x).argmax(1)
        return int((found == 1).sum())

    assert answers(seen.messages["flip"]) < answers(seen.update) / 3


def test_the_distance_of_a_boiling_frog_grows_with_the_rounds() -> None:
    model = TINY.model()  # type: ignore[operator]
    update = copied({n: t for n, t in model.state_dict().items() if t.is_floating_point()})
    poisoned = {name: tensor + torch.ones_like(tensor) for name, tensor in update.items()}
    limits = DistanceLimits.of(update)
    for round, share in ((1, 0.4), (3, 0.8), (4, 1.0), (40, 1.0)):
        context = context_of(
            update, round=round, honest={"a": update}, task=TINY, train=lambda task: poisoned
        )
        sent = boiling_frog(update, context, growth=0.2)
        used = limits.farthest(update, sent).share
        assert used == pytest.approx(0.95 * share, rel=1e-4)


def test_a_sybil_adds_a_step_of_the_given_size_that_helps_wrong_labels() -> None:
    recorder = recorded(
        {"small": named("sybil", size=0.01), "large": named("sybil", size=0.2)}, rounds=1
    )
    seen = recorder.seen[B, 0]
    ours = [seen.update, *seen.context.colluders.values()]
    centre = {name: torch.stack([one[name] for one in ours]).mean(0) for name in seen.update}
    for name, size in (("small", 0.01), ("large", 0.2)):
        step = difference(seen.messages[name], seen.update)
        assert norm(step) == pytest.approx(size * norm(centre), rel=1e-3)
    task = seen.context.task

    @torch.no_grad()
    def flipped_loss(weights: dict[str, Tensor]) -> float:
        model = network_with(task, weights)
        return sum(float(task.loss(model(x), (y + 1) % 3)) for x, y in task.val_data)

    assert flipped_loss(seen.messages["large"]) < flipped_loss(seen.update)
