"""A site's yardstick: its validation set, and a scratch network into which weights are put.

One probe serves one round.  It measures the site's own model once and every peer's against it; the
agreement and the loss of a peer come from the same forward pass.  It decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightyear_node.learning.agreement import Reference
from lightyear_node.learning.forward import at_rest, logits_of, to_device, unpack
from lightyear_node.learning.heads import find_head
from lightyear_node.learning.selection import twin
from lightyear_node.learning.statistics import estimate
from lightyear_node.learning.weights import load_into

Loss = Callable[[Tensor, Tensor], Tensor]

IGNORED_LABEL = -100
"""Torch's own mark for a pixel or sample that has no label."""


@dataclass(frozen=True, slots=True)
class Measured:
    agreement: float
    """A(θ_i, θ_j; V_i); NaN if the network's features are not finite."""
    loss: float | None
    """Mean over V_i; None where V_i has no labels."""


class Probe:
    """Fixed validation batches, and a private copy of the model to try weights on.

    Tensors that are not exchanged keep the values they have in `model`, or were given since.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        *,
        loss: Loss | None = None,
        head: str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.batches = list(batches)
        if not self.batches:
            raise ValueError("the validation set has no batches")
        self._scratch = twin(model)
        if device is not None:
            self._scratch.to(device)
        self.head = find_head(self._scratch, self.batches[0], head)
        self._meter = _LossMeter([unpack(batch)[1] for batch in self.batches], loss)
        self._reference: Reference | None = None
        self._own_loss: float | None = None
        self._own_statistics = False

    def furnish(self, at_home: Mapping[str, Tensor]) -> None:
        """Tensors of ours that peers do not send, with which their models are tried."""
        load_into(self._scratch, at_home)

    def anchor(self, own: Mapping[str, Tensor], *, own_statistics: bool = False) -> None:
        """Make `own` the model that peers are compared with.

        With `own_statistics` it and every peer's are measured with BatchNorm statistics of our
        validation set, whatever statistics they came with.
        """
        self._own_statistics = own_statistics
        self._load(own, own_statistics)
        total = _Mean()
        watch = self._watch(total)
        self._reference = Reference(self._scratch, self.batches, head=self.head, on_logits=watch)
        self._own_loss = total.value

    def measure(self, weights: Mapping[str, Tensor]) -> Measured:
        self._load(weights, self._own_statistics)
        total = _Mean()
        agreement = self.reference.agreement(self._scratch, on_logits=self._watch(total))
        return Measured(agreement, total.value)

    def loss_of(self, weights: Mapping[str, Tensor], *, own_statistics: bool) -> float | None:
        """The loss alone, which needs no model to compare with; None where V_i has no labels."""
        self._load(weights, own_statistics)
        total = _Mean()
        with at_rest(self._scratch):
            for index, batch in enumerate(self.batches):
                self._meter.add(total, index, logits_of(self._scratch, unpack(batch)[0]))
        return total.value

    def _load(self, weights: Mapping[str, Tensor], own_statistics: bool) -> None:
        load_into(self._scratch, weights)
        if own_statistics:
            estimate(self._scratch, self.batches)

    @property
    def reference(self) -> Reference:
        if self._reference is None:
            raise ValueError("anchor the probe to the own model first")
        return self._reference

    @property
    def own_loss(self) -> float | None:
        return self._own_loss

    @property
    def chance_loss(self) -> float:
        """ln C, the loss of guessing evenly; known once a model has been anchored."""
        return math.log(self._meter.classes)

    def _watch(self, total: _Mean) -> Callable[[int, Tensor], None]:
        def on_logits(index: int, logits: Tensor) -> None:
            self._meter.add(total, index, logits)

        return on_logits


class _Mean:
    def __init__(self) -> None:
        self.sum = 0.0
        self.count = 0

    def add(self, total: float, count: int) -> None:
        self.sum += total
        self.count += count

    @property
    def value(self) -> float | None:
        return self.sum / self.count if self.count else None


class _LossMeter:
    """Which loss measures regret.

    Cross-entropy if the labels are class indices, whatever the network was trained with, since
    ln C is then what guessing costs.  Binary cross-entropy, with C = 2, if each logit has a label
    in [0, 1].  Otherwise the task's own loss, for which ln C is no more than a scale.
    """

    def __init__(self, labels: list[Any], loss: Loss | None) -> None:
        self.labels = labels
        self.loss = loss
        self.classes = 2
        known = [y for y in labels if isinstance(y, Tensor) and y.numel()]
        marked = [y[y != IGNORED_LABEL] for y in known]
        self.low = min((float(y.min()) for y in marked if y.numel()), default=math.nan)
        self.high = max((float(y.max()) for y in marked if y.numel()), default=math.nan)

    def add(self, total: _Mean, index: int, logits: Tensor) -> None:
        y = self.labels[index]
        if y is None:
            return
        y = to_device(y, logits.device)
        if isinstance(y, Tensor):
            if y.ndim == logits.ndim > 1 and y.shape[1] == 1 < logits.shape[1]:
                y = y.squeeze(1)  # (n, 1, …), as masks are often stored
            if self._are_classes(logits, y):
                self.classes = logits.shape[1]
                loss = functional.cross_entropy(logits.float(), y.long(), reduction="sum")
                total.add(float(loss), int((y != IGNORED_LABEL).sum()))
                return
            if logits.numel() == y.numel() and self.low >= 0 and self.high <= 1:
                flat = logits.float().flatten(), y.float().flatten()
                loss = functional.binary_cross_entropy_with_logits(*flat, reduction="sum")
                total.add(float(loss), y.numel())
                return
        if self.loss is None:
            raise ValueError("the labels are not classes: the probe needs the task's loss")
        self.classes = max(2, logits.shape[1] if logits.ndim > 1 else 2)
        total.add(float(self.loss(logits, y)) * len(logits), len(logits))

    def _are_classes(self, logits: Tensor, y: Tensor) -> bool:
        return (
            not y.is_floating_point()
            and logits.ndim == y.ndim + 1
            and logits.shape[1] > 1
            and logits.shape[2:] == y.shape[1:]
            and self.low >= 0
            and self.high < logits.shape[1]
        )
