"""Gradients of a loss at given weights, and steps along them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightyear_node.lab.attacks.weights_math import Tensors
from lightyear_node.learning.exchanged_tensors import copy_with_ties
from lightyear_node.learning.forward import output_of, rows_of, to_device
from lightyear_node.learning.guard import DistanceLimits
from lightyear_node.learning.weights import load_into
from lightyear_node.worker.task import Task

CPU = torch.device("cpu")
Loss = Callable[[Any, Any], Tensor]


def network(task: Task) -> nn.Module:
    """A copy of the task's network on the CPU; tensors that are not exchanged keep their values."""
    model = task.model if isinstance(task.model, nn.Module) else task.model()
    return copy_with_ties(model).to(CPU)


class LossGradient:
    """The mean loss of a network over fixed batches, as a function of its exchanged tensors."""

    def __init__(self, task: Task, batches: Sequence[tuple[Any, Any]], loss: Loss) -> None:
        self._model = network(task).eval()
        self._batches = [to_device(batch, CPU) for batch in batches]
        self._loss = loss
        self._rows = sum(rows_of(x) for x, _ in batches)

    def at(self, weights: Tensors) -> dict[str, Tensor]:
        """The gradient by tensor; zero for tensors without one, such as statistics."""
        load_into(self._model, weights)
        self._model.zero_grad(set_to_none=True)
        with torch.enable_grad():
            for x, y in self._batches:
                loss = self._loss(output_of(self._model, x), y) * rows_of(x) / self._rows
                loss.backward()  # type: ignore[no-untyped-call]
        found = {name: one.grad for name, one in self._model.named_parameters()}
        return {
            name: torch.zeros_like(tensor) if (slope := found.get(name)) is None else slope.clone()
            for name, tensor in weights.items()
        }


def stepped(
    weights: Tensors, gradient: Tensors, limits: DistanceLimits, rate: float
) -> dict[str, Tensor]:
    """Move each tensor along its gradient by `rate` times the distance that the guard allows it.

    A negative rate descends.
    """
    found = {name: tensor.clone() for name, tensor in weights.items()}
    for name, scale in limits.scales.items():
        size = float(torch.linalg.vector_norm(gradient[name]))
        if size > 0:
            found[name] += gradient[name] * (rate * limits.limits[name] * scale / size)
    return found
