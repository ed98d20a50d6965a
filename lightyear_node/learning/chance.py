"""Measures the loss of guessing on the validation set: the unit of the guard and the merge check.

For class labels this is ln C.  Any other loss has its own scale and may be negative, so two outputs
that need no network are fitted to the validation labels with the task's loss:

    level   loss of the best constant output, one value per channel
    unit    how much lower the loss of the best output with two values per channel is

The constant output is the usual null model: the mean for squared errors, the median for absolute
ones, equal risks for a partial likelihood (Cox), equal similarities for a contrastive loss.  The
two values of a channel are assigned to samples by the sign of the loss's gradient at the constant,
so the unit is what one bit about each target is worth: about 0.64 variances for squared errors,
about ln 2 for a partial likelihood.  Being a difference, it does not change if a constant is added
to the loss, and grows in proportion if the loss is multiplied.  The lowest possible loss would not
do: some losses have none, and for a partial likelihood no model comes near it.

If the loss of a constant output is not finite (a correlation, for example), level and unit are the
loss of the untrained common start with each output given to another sample.

Only our own labels and the common start enter, so no peer can influence the result.  It is measured
once, without passes of the network.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

STEPS = 80
"""Steps of each fit; each one evaluates the loss on all validation labels, without the network."""
FIRST_STEP = 0.1
FIRST_GROWTH, GROWTH = 2.0, 1.2
SLOPE_MIN = 1e-5
"""A slope that is a smaller share of the sum of its parts' magnitudes is rounding."""

SHIFTS = 8
"""How many other samples an output is given to, if a constant output has no loss."""
UNIT_MIN = 1e-4
"""A difference that is a smaller share of the level is rounding, not a unit."""

Loss = Callable[[Any, Any], Tensor]
Pattern = list[list[Tensor]]


@dataclass(frozen=True, slots=True)
class Chance:
    """The loss of guessing, and the unit in which differences of losses are limited."""

    level: float
    unit: float
    """Positive."""
    measured: bool = False
    """Whether the level was measured.  The loss may then start far above it."""

    @classmethod
    def of_classes(cls, classes: int) -> Chance:
        return cls(math.log(classes), math.log(classes))

    def shortfall(self, own_loss: float) -> float:
        """How far our own model is above the level, for a measured one; otherwise 0."""
        return max(0.0, own_loss - self.level) if self.measured else 0.0


def measure_chance(
    loss: Loss, outputs: Sequence[Any], labels: Sequence[Any], start_loss: float
) -> Chance:
    """`outputs` and `start_loss` are those of the untrained common start, batch by batch."""
    fit = _Fit(loss, outputs, labels)
    means = _means(outputs)
    constant, level = fit.minimise([fit.ones], means[None])
    if not math.isfinite(level):
        level = fit.of_wrong_rows()
        level = level if math.isfinite(level) else start_loss
        return Chance(level, _first_above(0.0, abs(level)), measured=True)
    # The best constant may be at the end of a sigmoid, where all slopes vanish.
    lowest = min(fit.best_two_values(around) for around in (constant[0], means))
    gaps = (level - lowest, abs(level), abs(start_loss - level))
    return Chance(level, _first_above(UNIT_MIN * abs(level), *gaps), measured=True)


class _Fit:
    """Minimises the task's loss over outputs with a few parameters per channel.

    An output is a sum of patterns, each multiplied by one parameter per channel.  A pattern
    consists of the tensors of each batch's output.
    """

    def __init__(self, loss: Loss, outputs: Sequence[Any], labels: Sequence[Any]) -> None:
        self._loss = loss
        self._outputs = outputs
        self._labels = labels
        tensors = [_tensors(output) for output in outputs]
        self._shares = [len(parts[0]) / sum(len(one[0]) for one in tensors) for parts in tensors]
        self.ones: Pattern = [[torch.ones_like(part) for part in parts] for parts in tensors]

    def minimise(self, patterns: Sequence[Pattern], start: Tensor) -> tuple[Tensor, float]:
        """The best parameters and their loss, which is infinite if it is not finite at the start.

        Parameters are (patterns, channels).  Each has its own step: halved when the sign of its
        slope changes, otherwise longer than before (Rprop; doubled until the first change).  So
        scales do not matter.
        """
        parameters, best, lowest = start, start, math.inf
        steps, before = torch.full_like(start, FIRST_STEP), torch.zeros_like(start)
        growth = torch.full_like(start, FIRST_GROWTH)
        for _ in range(STEPS):
            value, slope, size = self._measure(patterns, parameters)
            if not (math.isfinite(value) and bool(slope.isfinite().all())):
                # Outside of the loss's domain: back to the best point, and shorter steps.
                steps = steps / 4
                parameters = best - before.sign() * steps
                continue
            if value < lowest:
                best, lowest = parameters, value
            turn = slope.sign() * before.sign()
            growth = torch.where(turn < 0, GROWTH, growth)
            steps = torch.where(turn > 0, growth * steps, torch.where(turn < 0, steps / 2, steps))
            moves = slope.abs() > SLOPE_MIN * size
            if not bool(moves.any()):
                break
            before = slope
            parameters = parameters - slope.sign() * steps * moves
        return best, lowest

    def best_two_values(self, around: Tensor) -> float:
        """Lowest loss of outputs with two values per channel.

        An entry's value is chosen by the sign of the loss's slope at the constant `around`.
        """
        batches = range(len(self._outputs))
        slopes = [self._slopes(index, [self.ones], around[None])[1] for index in batches]
        sides = [[-slope.nan_to_num().sign() for slope in parts] for parts in slopes]
        return self.minimise([self.ones, sides], torch.stack([around, 0 * around]))[1]

    def of_wrong_rows(self) -> float:
        """Mean loss of the given outputs if each belongs to another sample of its batch."""
        total = 0.0
        for share, output, labels in zip(self._shares, self._outputs, self._labels, strict=True):
            shifts = range(1, max(2, min(SHIFTS + 1, len(_tensors(output)[0]))))
            for shift in shifts:
                rolled = [part.roll(shift, 0) for part in _tensors(output)]
                total += share * float(self._loss(_replaced(output, rolled), labels)) / len(shifts)
        return total

    def _measure(
        self, patterns: Sequence[Pattern], parameters: Tensor
    ) -> tuple[float, Tensor, Tensor]:
        """The loss, its slope along each parameter, and the sum of its parts without signs.

        A slope that is much smaller than that sum is zero but for rounding.
        """
        value, slope, size = 0.0, torch.zeros_like(parameters), torch.zeros_like(parameters)
        for index, share in enumerate(self._shares):
            loss, slopes = self._slopes(index, patterns, parameters)
            value += share * loss
            for row, pattern in enumerate(patterns):
                parts = [own * part for own, part in zip(slopes, pattern[index], strict=True)]
                slope[row] += share * torch.cat([_channel_sums(part) for part in parts])
                size[row] += share * torch.cat([_channel_sums(part.abs()) for part in parts])
        return value, slope, size

    def _slopes(
        self, index: int, patterns: Sequence[Pattern], parameters: Tensor
    ) -> tuple[float, list[Tensor]]:
        """A batch's loss and its slope along each entry of the output."""
        first, *rest = [
            _times(pattern[index], own) for pattern, own in zip(patterns, parameters, strict=True)
        ]
        for more in rest:
            first = [left + right for left, right in zip(first, more, strict=True)]
        leaves = [tensor.detach().requires_grad_() for tensor in first]
        try:
            with torch.enable_grad():
                loss = self._loss(_replaced(self._outputs[index], leaves), self._labels[index])
            slopes = torch.autograd.grad(loss, leaves, allow_unused=True)
        except Exception:  # the user's loss accepts outputs of a network, but perhaps not these
            return math.nan, [torch.zeros_like(leaf) for leaf in leaves]
        return float(loss.detach()), [
            torch.zeros_like(leaf) if slope is None else slope
            for leaf, slope in zip(leaves, slopes, strict=True)
        ]


def _means(outputs: Sequence[Any]) -> Tensor:
    """The mean of each channel: a point in the domain of the loss."""
    sums, counts = [], []
    for parts in zip(*map(_tensors, outputs), strict=True):
        sums.append(torch.stack([_channel_sums(part) for part in parts]).sum(0))
        counts += [sum(part.numel() for part in parts) / len(sums[-1])] * len(sums[-1])
    means: Tensor = torch.cat(sums) / torch.tensor(counts, device=sums[0].device)
    return means.nan_to_num(0.0, 0.0, 0.0)


def _channel_sums(part: Tensor) -> Tensor:
    """(n, K, …) → (K,), and (n,) → (1,)."""
    if part.ndim < 2:
        return part.float().sum(0, keepdim=True)
    return part.float().movedim(1, -1).flatten(0, -2).sum(0)


def _times(parts: Sequence[Tensor], values: Tensor) -> list[Tensor]:
    """Multiply each channel by its value."""
    channels = [part.shape[1] if part.ndim > 1 else 1 for part in parts]
    return [
        part * own.to(part.dtype).view(-1, *[1] * (part.ndim - 2))
        for part, own in zip(parts, torch.split(values, channels), strict=True)
    ]


def _tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors of an output with one row per sample."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _mapped(output, note)
    return found


def _replaced(output: Any, tensors: Sequence[Tensor]) -> Any:
    given = iter(tensors)
    return _mapped(output, lambda _: next(given))


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a model's output in which each of `_tensors` is replaced."""
    if isinstance(value, Tensor):
        return function(value) if value.ndim and value.is_floating_point() else value
    if isinstance(value, MutableMapping):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = _mapped(item, function)
        return made
    if isinstance(value, tuple | list):
        items = [_mapped(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return replace(value, **{name: _mapped(getattr(value, name), function) for name in names})
    return value


def _first_above(least: float, *values: float) -> float:
    """The first of the values that is finite and above `least`; otherwise 1."""
    return next((one for one in values if math.isfinite(one) and one > least), 1.0)
