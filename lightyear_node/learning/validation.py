"""Measures models on a site's validation set: agreement with the own model, and loss.

The own model is measured once per round.  A peer's agreement and loss come from one forward pass.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightyear_node.errors import InvalidTask
from lightyear_node.learning.agreement import AS_DEFINED, NO_BATCHES, Reading, ReferenceKernels
from lightyear_node.learning.batchnorm import estimate_statistics
from lightyear_node.learning.chance import Chance, measure_chance
from lightyear_node.learning.confirmation import rows_of_batch, selected
from lightyear_node.learning.decisions import (
    GROUP,
    WORST,
    binary_losses,
    binary_scores,
    class_losses,
    class_scores,
)
from lightyear_node.learning.exchanged_tensors import copy_with_ties
from lightyear_node.learning.final_layer import find_final_layers
from lightyear_node.learning.forward import (
    OnOutput,
    batch_rows,
    evaluation_mode,
    output_of,
    to_device,
    unpack,
)
from lightyear_node.learning.outputs import Choice, predictions
from lightyear_node.learning.weights import load_into

Loss = Callable[[Any, Any], Tensor]

IGNORED_LABEL = -100
"""Torch's value for a pixel or sample without a label."""
LABEL_SMOOTHING = 0.01
"""A label of 1 has the logit of a probability of 0.99."""


@dataclass(frozen=True, slots=True)
class ValidationResult:
    agreement: float
    """A(θ_i, θ_j; V_i); NaN if the network's features are not finite."""
    loss: float | None
    """Mean over V_i; None if V_i has no labels."""


@dataclass(frozen=True, slots=True)
class SampleScores:
    """Scores of one model on each sample or group of samples; higher is better (`decisions`)."""

    decisions: Tensor
    losses: Tensor | None
    """Minus the loss; None if the labels are no decisions, so that `decisions` are losses."""


class Validation:
    """Fixed validation batches, and a copy of the model that weights are loaded into.

    Tensors that are not exchanged keep their values in `model`, or those of `set_local_tensors`.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        *,
        loss: Loss | None = None,
        head: str | None = None,
        output: Choice | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.batches = list(batches)
        self._inputs = self.batches
        """BatchNorm statistics are estimated on all samples, also by a `subset`."""
        if not self.batches:
            raise InvalidTask(NO_BATCHES)
        self._scratch = copy_with_ties(model)
        if device is not None:
            self._scratch.to(device)
        self.final_layers = find_final_layers(self._scratch, self.batches[0], head, output)
        self._meter = _LossMeter([unpack(batch)[1] for batch in self.batches], loss, output)
        self._reference: ReferenceKernels | None = None
        self._own_loss: float | None = None
        self._own_statistics = False

    def set_local_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the tensors that are not exchanged; peers' models are measured with them."""
        load_into(self._scratch, tensors)

    def set_reference(
        self,
        own: Mapping[str, Tensor],
        *,
        own_statistics: bool = False,
        previous: Mapping[str, Tensor] | None = None,
        reading: Reading = AS_DEFINED,
    ) -> None:
        """Make `own` the model that peers are compared with.

        With `own_statistics` all models are measured with BatchNorm statistics of our validation
        set in place of their own.  With `previous`, the agreement is with that model instead;
        losses are still compared with that of `own`.
        """
        self._own_statistics = own_statistics
        self._load(own, own_statistics)
        total = _Mean()
        self._reference = ReferenceKernels(
            self._scratch, self.batches, self.final_layers, self._adder(total), reading
        )
        self._own_loss = total.value
        self._meter.measure_chance(total.value)
        if previous is not None:
            self._load(previous, own_statistics)
            self._reference = ReferenceKernels(
                self._scratch, self.batches, self.final_layers, reading=reading
            )

    def measure(self, weights: Mapping[str, Tensor]) -> ValidationResult:
        self._load(weights, self._own_statistics)
        total = _Mean()
        agreement = self.reference.agreement(self._scratch, on_output=self._adder(total))
        return ValidationResult(agreement, total.value)

    def loss_of(self, weights: Mapping[str, Tensor], *, own_statistics: bool) -> float | None:
        """The loss without the agreement, so no reference is needed; None if V_i has no labels."""
        return self.loss_and_decisions(weights, own_statistics=own_statistics)[0]

    def loss_and_decisions(
        self, weights: Mapping[str, Tensor], *, own_statistics: bool
    ) -> tuple[float | None, Tensor | None]:
        """The loss, and the scores of the decisions; None where the labels have none."""
        self._load(weights, own_statistics)
        total, decisions = _Mean(), []
        with evaluation_mode(self._scratch):
            for index, batch in enumerate(self.batches):
                output = output_of(self._scratch, unpack(batch)[0])
                self._meter.add(total, index, output)
                found = self._meter.scores(index, output)
                decisions += [] if found is None else [found[0]]
        return total.value, _bounded(decisions) if decisions else None

    def scores_of(self, model: nn.Module) -> SampleScores:
        decisions, losses = [], []
        with evaluation_mode(model):
            for index, batch in enumerate(self.batches):
                output = output_of(model, unpack(batch)[0])
                found = self._meter.scores(index, output)
                if found is None:
                    decisions.append(self._group_scores(model, batch))
                else:
                    decisions.append(found[0])
                    losses.append(found[1])
        return SampleScores(_bounded(decisions), _bounded(losses) if losses else None)

    def subset(self, samples: Sequence[int]) -> Validation:
        """The same with only these samples; `chance` stays that of all of them."""
        part = copy.copy(self)
        part.batches = selected(self.batches, samples)
        part._meter = self._meter.with_labels([unpack(batch)[1] for batch in part.batches])
        part._reference = None
        part._own_loss = None
        return part

    def _group_scores(self, model: nn.Module, batch: Any) -> Tensor:
        def losses(groups: Sequence[Any]) -> list[float]:
            return [
                self._meter.task_loss(output_of(model, inputs), labels)
                for inputs, labels in map(unpack, groups)
            ]

        rows = batch_rows(batch)
        starts = range(0, max(1, rows - GROUP + 1), GROUP)
        parts = zip(starts, [*starts[1:], rows], strict=True)
        try:
            found = losses([rows_of_batch(batch, range(*part)) for part in parts])
        except Exception:  # the user's loss may need the whole batch
            found = losses([batch])
        return -torch.tensor(found, dtype=torch.float64)

    def _load(self, weights: Mapping[str, Tensor], own_statistics: bool) -> None:
        load_into(self._scratch, weights)
        if own_statistics:
            estimate_statistics(self._scratch, self._inputs)

    @property
    def reference(self) -> ReferenceKernels:
        if self._reference is None:
            raise InvalidTask(
                "there is no reference: call `set_reference` with our own model first"
            )
        return self._reference

    @property
    def own_loss(self) -> float | None:
        return self._own_loss

    @property
    def chance(self) -> Chance:
        """The loss of guessing; known once a reference has been set, and the same from then on."""
        return self._meter.chance

    def _adder(self, total: _Mean) -> OnOutput:
        return lambda index, output: self._meter.add(total, index, output)


def _bounded(scores: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(scores)).nan_to_num(WORST).clamp(min=WORST)


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


class _Form(Enum):
    CLASSES = auto()
    BINARY = auto()
    OTHER = auto()


class _LossMeter:
    """Computes the loss that measures regret, and the loss of guessing.

    Cross-entropy if the labels are class indices, whatever the network was trained with.  Binary
    cross-entropy, with C = 2, if each output is the logit of a label in [0, 1].  Guessing then
    costs ln C.  Otherwise, and for several heads, the task's own loss of the model's whole output,
    for which the loss of guessing is measured.
    """

    def __init__(self, labels: list[Any], loss: Loss | None, choice: Choice | None) -> None:
        self.labels = labels
        self.loss = loss
        self.choice = choice
        self.chance = Chance.of_classes(2)
        known = [y for y in labels if isinstance(y, Tensor) and y.numel()]
        marked = [y[y != IGNORED_LABEL] for y in known]
        self.low = min((float(y.min()) for y in marked if y.numel()), default=math.nan)
        self.high = max((float(y.max()) for y in marked if y.numel()), default=math.nan)
        self._first: list[tuple[Any, Any]] | None = []
        """Outputs of the first model that was measured, and their labels."""
        self._outputs_are_logits: bool | None = None

    def add(self, total: _Mean, index: int, output: Any) -> None:
        y = self.labels[index]
        if y is None:
            return
        form, logits, labels = self._form(index, output)
        if form is _Form.CLASSES:
            self.chance = Chance.of_classes(logits.shape[1])
            loss = functional.cross_entropy(logits.float(), labels.long(), reduction="sum")
            total.add(float(loss), int((labels != IGNORED_LABEL).sum()))
        elif form is _Form.BINARY:
            flat = logits.float().flatten(), labels.float().flatten()
            loss = functional.binary_cross_entropy_with_logits(*flat, reduction="sum")
            total.add(float(loss), labels.numel())
        else:
            given = to_device(y, logits.device)
            if self._first is not None:
                self._first.append((output, given))
            total.add(self.task_loss(output, given) * len(logits), len(logits))

    def scores(self, index: int, output: Any) -> tuple[Tensor, Tensor] | None:
        """Scores of the samples' decisions, and minus their losses; None if the labels are neither.

        Labels that are no decisions, such as a regression's, have the loss of the task alone.
        """
        form, logits, labels = self._form(index, output)
        if form is _Form.CLASSES:
            both = (
                class_scores(logits, labels, IGNORED_LABEL),
                class_losses(logits, labels, IGNORED_LABEL),
            )
        elif form is _Form.BINARY:
            both = binary_scores(logits, labels), binary_losses(logits, labels)
        else:
            return None
        return both[0].cpu(), both[1].cpu()

    def task_loss(self, output: Any, y: Any) -> float:
        if self.loss is None:
            raise InvalidTask("the labels are not classes, so the loss of the task is needed")
        device = next(iter(predictions(output, self.choice).values())).device
        return float(self.loss(output, to_device(y, device)))

    def with_labels(self, labels: list[Any]) -> _LossMeter:
        """The same for other samples of the set, whose loss of guessing is known already."""
        other = copy.copy(self)
        other.labels = labels
        other._first = None
        return other

    def _form(self, index: int, output: Any) -> tuple[_Form, Tensor, Any]:
        """What the labels are, the first prediction, and the labels as that has them."""
        heads = list(predictions(output, self.choice).values())
        logits = heads[0]
        y = to_device(self.labels[index], logits.device)
        form = _Form.OTHER
        if isinstance(y, Tensor) and len(heads) == 1:
            if y.ndim == logits.ndim > 1 and y.shape[1] == 1 < logits.shape[1]:
                y = y.squeeze(1)  # (n, 1, …) → (n, …), as masks are often stored
            if self._are_classes(logits, y):
                form = _Form.CLASSES
            elif self._are_binary(logits, y):
                form = _Form.BINARY
        return form, logits, y

    def measure_chance(self, first_loss: float | None) -> None:
        """After the first pass: measure the loss of guessing, if the task's own loss is used."""
        first, self._first = self._first, None
        if first and self.loss is not None and first_loss is not None:
            outputs, labels = zip(*first, strict=True)
            self.chance = measure_chance(self.loss, outputs, labels, first_loss)

    def _are_classes(self, logits: Tensor, y: Tensor) -> bool:
        return (
            not y.is_floating_point()
            and logits.ndim == y.ndim + 1
            and logits.shape[1] > 1
            and logits.shape[2:] == y.shape[1:]
            and self.low >= 0
            and self.high < logits.shape[1]
        )

    def _are_binary(self, logits: Tensor, y: Tensor) -> bool:
        """Whether each output is the logit of a label; a regression may have such targets, too."""
        if logits.numel() != y.numel() or not (self.low >= 0 and self.high <= 1):
            return False
        if self._outputs_are_logits is None:
            self._outputs_are_logits = self.loss is None or _prefers_logits(self.loss, logits, y)
        return self._outputs_are_logits


def _prefers_logits(loss: Loss, logits: Tensor, y: Tensor) -> bool:
    """Whether outputs equal to the labels' logits have a lower loss than the labels themselves."""
    same = y.to(logits.dtype).reshape(logits.shape)
    try:
        return float(loss(torch.logit(same, LABEL_SMOOTHING), y)) < float(loss(same, y))
    except Exception:  # the user's loss, on outputs that are not a network's
        return True
