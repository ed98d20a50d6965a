"""Attacks that train on wrong labels, or move models towards one that was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightyear_node.errors import ConfigError, InvalidTask, TaskFailed
from lightyear_node.lab.attacks.colluding import batches_of, colluders_tasks, colluders_updates
from lightyear_node.lab.attacks.loss_gradient import LossGradient, stepped
from lightyear_node.lab.attacks.option_values import positive, whole
from lightyear_node.lab.attacks.victim import choose_victim
from lightyear_node.lab.attacks.weights_math import Tensors, difference, mean, moved, norm
from lightyear_node.lab.corrupted_updates import with_flipped_labels
from lightyear_node.lab.malfunction_plugins import AttackContext
from lightyear_node.learning.guard import DistanceLimits
from lightyear_node.worker.task import Task
from lightyear_node.worker.training import split_batch

RATE = 0.1
"""Length of a step towards a label-flipped model, as a share of the guard's distance limit."""


def targeted_flip(
    update: Tensors, context: AttackContext, source: int = 1, target: int = 0
) -> dict[str, Tensor]:
    """Train on labels of which class `source` is changed to `target`."""
    old, new = whole("source", source), whole("target", target)
    if old == new:
        raise ConfigError(f"options source and target are both {old}")

    def flipped(x: Any, y: Any) -> tuple[Any, Any]:
        labels = class_labels(y).clone()
        labels[labels == old] = new
        return x, labels

    return context.train(with_changed_batches(context.task, flipped))


def boiling_frog(
    update: Tensors, context: AttackContext, growth: float = 0.1, victim: str | None = None
) -> dict[str, Tensor]:
    """The victim's model, moved towards wrong labels by a distance that grows with the rounds.

    In round t the distance is min(1, growth · (t + 1)) of what the guard allows.
    """
    rate = positive("growth", growth)
    chosen = choose_victim(context, victim)
    if chosen is None:
        return dict(update)
    poison = difference(context.train(with_flipped_labels(context.task)), update)
    return chosen.along(poison, min(1.0, rate * (context.round + 1)))


def sybil(
    update: Tensors, context: AttackContext, size: float = 0.05, steps: int = 5
) -> dict[str, Tensor]:
    """The honest update plus a small step, common to all colluders, towards wrong labels.

    The step is `size` times as long as the colluders' mean model.  Its direction is that of `steps`
    steps from this mean down the loss of flipped labels on the colluders' training data.
    """
    length = positive("size", size)
    tasks = colluders_tasks(context)
    centre = mean(colluders_updates(update, context))
    loss = with_flipped_labels(tasks[0]).loss
    slope = LossGradient(tasks[0], batches_of(tasks, "train_data"), loss)
    limits, poisoned = DistanceLimits.of(centre), centre
    for _ in range(whole("steps", steps, at_least=1)):
        poisoned = stepped(poisoned, slope.at(poisoned), limits, -RATE)
    step = difference(poisoned, centre)
    return moved(update, step, length * norm(centre) / norm(step) if norm(step) else 0.0)


def with_changed_batches(task: Task, change: Callable[[Any, Any], tuple[Any, Any]]) -> Task:
    """The task with a function applied to (input, target) of every batch."""
    if task.train_round is not None:
        raise TaskFailed(
            "the data of a task with its own `train_round` cannot be changed",
            hint="choose another attack",
        )
    return replace(task, prepare_batch=lambda batch: change(*split_batch(task, batch)))


def class_labels(y: Any) -> Tensor:
    """The labels themselves, if they are whole numbers; otherwise an error."""
    if not isinstance(y, Tensor) or bool((y != y.long()).any()):
        raise InvalidTask(
            "the labels are not class indices, nor 0 and 1",
            hint="a regression has no classes: choose another attack",
        )
    return y
