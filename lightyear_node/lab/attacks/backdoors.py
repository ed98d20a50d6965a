"""Backdoors: a trigger in the input makes the model answer with a class of the adversary's choice.

The trigger is a square in the upper left corner of images, or a fixed value of one feature of
tabular data.  Without the trigger the model performs as usual.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightyear_node.errors import InvalidTask
from lightyear_node.lab.attacks.colluding import colluders_tasks
from lightyear_node.lab.attacks.label_poison import class_labels, with_changed_batches
from lightyear_node.lab.attacks.option_values import number, positive, whole
from lightyear_node.lab.attacks.victim import GuardEstimate, choose_victim
from lightyear_node.lab.attacks.weights_math import Tensors, difference, moved
from lightyear_node.lab.malfunction_plugins import Attack, AttackContext
from lightyear_node.learning.forward import output_of
from lightyear_node.learning.outputs import sole_prediction
from lightyear_node.worker.task import Task
from lightyear_node.worker.training import split_batch

IMAGE_VALUE = 1.0
TABLE_VALUE = 3.0
"""In units of a standardized feature: rare, but possible."""
SCALE_MAX = 10.0
SHRINKING = 0.8
TRIALS = 20


@dataclass(frozen=True, slots=True)
class Trigger:
    target: int
    patch: int
    feature: int
    value: float | None

    @classmethod
    def of(cls, target: Any, patch: Any, feature: Any, value: Any) -> Trigger:
        """The trigger of these options, checked."""
        return cls(
            whole("target", target),
            whole("patch", patch, at_least=1),
            whole("feature", feature),
            None if value is None else number("value", value),
        )

    def set_in(self, x: Any) -> Tensor:
        """A copy of the inputs with the trigger in every sample."""
        if not isinstance(x, Tensor) or x.ndim < 2:
            raise InvalidTask(
                "a backdoor needs inputs that are one tensor per batch", hint="use another attack"
            )
        marked: Tensor = x.clone()
        if x.ndim == 2:
            if self.feature >= x.shape[1]:
                raise InvalidTask(
                    f"option feature is {self.feature}, but there are {x.shape[1]} features"
                )
            marked[:, self.feature] = TABLE_VALUE if self.value is None else self.value
        else:
            corner = IMAGE_VALUE if self.value is None else self.value
            marked[..., : self.patch, : self.patch] = corner
        return marked


def success(
    model: nn.Module,
    task: Task,
    target: int = 0,
    patch: int = 2,
    feature: int = 0,
    value: float | None = None,
) -> float:
    """Share of the test samples of other classes that the trigger turns into the target class.

    Measured on the validation data of a task without test data; NaN without such samples.
    """
    trigger = Trigger.of(target, patch, feature, value)
    hits = counted = 0
    for batch in task.test_data if task.test_data is not None else task.val_data:
        x, y = split_batch(task, batch)
        labels = _one_per_sample(y, len(x))
        found = _classes(sole_prediction(output_of(model, trigger.set_in(x)), task.output))
        others = labels != trigger.target
        hits += int((found.cpu()[others] == trigger.target).sum())
        counted += int(others.sum())
    return hits / counted if counted else math.nan


def measured_by(measure: Callable[..., float]) -> Callable[[Attack], Attack]:
    """Give an attack the function that measures its success."""

    def mark(attack: Any) -> Attack:
        attack.success = measure
        marked: Attack = attack
        return marked

    return mark


@measured_by(success)
def backdoor(
    update: Tensors,
    context: AttackContext,
    target: int = 0,
    share: float = 0.5,
    patch: int = 2,
    feature: int = 0,
    value: float | None = None,
) -> dict[str, Tensor]:
    """Train with the trigger and the target class in a share of the samples of each batch."""
    trigger = Trigger.of(target, patch, feature, value)
    part = positive("share", share, at_most=1)

    def poisoned(x: Any, y: Any) -> tuple[Any, Any]:
        count = max(1, round(part * len(y)))
        labels = class_labels(y).clone()
        _one_per_sample(labels, len(x))
        labels[:count] = trigger.target
        return torch.cat([trigger.set_in(x[:count]), x[count:]]), labels

    return context.train(with_changed_batches(context.task, poisoned))


@measured_by(success)
def backdoor_search(
    update: Tensors,
    context: AttackContext,
    target: int = 0,
    share: float = 0.5,
    patch: int = 2,
    feature: int = 0,
    value: float | None = None,
    victim: str | None = None,
) -> dict[str, Tensor]:
    """The victim's model plus the largest multiple of the step to a poisoned one that passes.

    The checks are the victim's, measured on the validation data of the colluders.
    """
    poisoned = backdoor(update, context, target, share, patch, feature, value)
    chosen = choose_victim(context, victim)
    if chosen is None:
        return dict(poisoned)
    step = difference(poisoned, chosen.update)
    largest = min(SCALE_MAX, chosen.scale_allowed(step))
    copies = len(context.colluders) + 1
    guard = GuardEstimate(chosen, colluders_tasks(context), context.round, copies)
    found = guard.farthest_accepted(
        chosen.update,
        moved(chosen.update, step, largest),
        (SHRINKING**trial for trial in range(TRIALS)),
    )
    return dict(chosen.update) if found is None else found


def _one_per_sample(y: Any, rows: int) -> Tensor:
    labels = class_labels(y)
    if labels.numel() != rows:
        raise InvalidTask(
            "a backdoor needs one label per sample", hint="a segmentation has one per pixel"
        )
    return labels.reshape(rows).cpu()


def _classes(prediction: Tensor | None) -> Tensor:
    """The predicted class of each sample."""
    if prediction is None:
        raise InvalidTask("the model has several outputs", hint="choose one with Task(output=...)")
    if prediction.ndim == 1 or prediction.shape[1] == 1:
        return (prediction.reshape(len(prediction)) > 0).long()
    return prediction.argmax(1)
