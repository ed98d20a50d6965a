"""A network and its optimizer, which are trained, saved and restored together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightyear_node.errors import TaskFailed
from lightyear_node.learning.probe import IGNORED_LABEL
from lightyear_node.worker.task import Task
from lightyear_node.worker.train import Progress, train_one_round


class Trainee:
    def __init__(self, task: Task, model: nn.Module, device: torch.device) -> None:
        self.task = task
        self.device = device
        self.model = model.to(device)
        self.optimizer = task.optimizer(self.model.parameters())

    def train(
        self,
        seed: int,
        progress: Progress,
        *,
        pull: float = 0.0,
        towards: Mapping[str, Tensor] | None = None,
    ) -> None:
        """One round; the same seed from the same state gives the same weights.

        With a `pull`, (pull / 2) ‖w − w₀‖² is added to the loss, where w₀ are the weights that we
        start from, or those of `towards`.
        """
        torch.manual_seed(seed)
        anchors = []
        if pull:
            given = towards if towards is not None else dict(self.model.named_parameters())
            anchors = [
                (parameter, given[name].detach().clone().to(self.device))
                for name, parameter in self.model.named_parameters()
                if name in given
            ]
        with _pulled(self.optimizer, anchors, pull):
            train_one_round(self.task, self.model, self.optimizer, self.device, progress)

    def carried(self, names: Set[str] | None = None) -> dict[str, Any]:
        """The optimizer's state and the tensors of these names, or all."""
        state = self.model.state_dict()
        chosen = {name: value for name, value in state.items() if names is None or name in names}
        return {"tensors": chosen, "optimizer": self.optimizer.state_dict()}

    def restore(self, carried: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(carried["optimizer"])
        state = self.model.state_dict()
        with torch.no_grad():
            for name, value in carried["tensors"].items():
                state[name].copy_(value)


@contextmanager
def _pulled(
    optimizer: Optimizer, anchors: Iterable[tuple[nn.Parameter, Tensor]], pull: float
) -> Iterator[None]:
    """Add the pull's gradient before each step: this also serves a training loop of the user's."""

    def add(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for parameter, anchor in anchors:
                if parameter.grad is not None:
                    parameter.grad.add_(parameter - anchor, alpha=pull)

    if not pull:
        yield
        return
    hook = optimizer.register_step_pre_hook(add)
    try:
        yield
    finally:
        hook.remove()


def poisoned(task: Task) -> Task:
    """The same task with every label replaced by another class: c becomes c + C/2 modulo C."""
    if task.train_round is not None:
        raise TaskFailed(
            "the labels of a task with its own `train_round` cannot be flipped",
            hint="choose another malfunction",
        )
    return replace(task, loss=_on_flipped_labels(task.loss))


def _on_flipped_labels(
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Tensor, Tensor], Tensor]:
    def on_flipped(logits: Tensor, y: Tensor) -> Tensor:
        if y.is_floating_point():
            return loss(logits, 1 - y)
        classes = max(2, logits.shape[1] if logits.ndim > 1 else 2)
        flipped = (y + classes // 2) % classes
        return loss(logits, torch.where(y == IGNORED_LABEL, y, flipped))

    return on_flipped
