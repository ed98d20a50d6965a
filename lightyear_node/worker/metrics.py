"""Metrics of a task: torchmetrics' and MONAI's objects, and plain functions.

update(output, target), compute(), reset()                 as in torchmetrics
__call__(y_pred=..., y=...), aggregate(), reset()          as in MONAI
function(output, target) -> number                         averaged over samples
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightyear_node.errors import LightyearError, TaskFailed
from lightyear_node.worker.memory_limit import ran_out

CLASSES_NAMED_MAX = 32
"""Results with more entries are reported as their mean only."""


class MetricMeter:
    """One metric of a task over one pass of the data."""

    def __init__(self, name: str, metric: Any, device: torch.device) -> None:
        self.name = name
        self._metric = metric
        self._sum = 0.0
        self._samples = 0
        self._streams = hasattr(metric, "update") and hasattr(metric, "compute")
        self._aggregates = not self._streams and hasattr(metric, "aggregate")
        if not self._streams and not callable(metric):
            raise TaskFailed(
                f"the metric `{name}` is {type(metric).__name__}, which cannot be called",
                hint="give a function (output, target) -> number, or an object of torchmetrics or"
                " monai.metrics",
            )
        with self._named_in_errors():
            if isinstance(metric, nn.Module):
                metric.to(device)
            if self._streams or self._aggregates:
                metric.reset()

    def add(self, prediction: Any, target: Any, rows: int) -> None:
        with self._named_in_errors():
            if self._streams:
                self._metric.update(prediction, target)
            elif self._aggregates:
                self._metric(y_pred=prediction, y=target)
            else:
                value = numbers(self.name, self._metric(prediction, target))[self.name]
                self._sum += value * rows
                self._samples += rows

    def result(self) -> dict[str, float]:
        """The metric under its name, and each of several entries under a name of its own."""
        with self._named_in_errors():
            if self._streams:
                return numbers(self.name, self._metric.compute())
            if not self._aggregates:
                return {self.name: self._sum / max(self._samples, 1)}
            value = self._metric.aggregate()
            if isinstance(value, tuple | list):
                counts = bool(getattr(self._metric, "get_not_nans", False))
                values = value[::2] if counts else value  # every second one is a count
                value = values[0] if len(values) == 1 else torch.stack([*map(_mean, values)])
            return numbers(self.name, value)

    @contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        try:
            yield
        except (LightyearError, OSError):
            raise
        except Exception as problem:  # the user's code may raise anything
            if ran_out(problem):
                raise
            raise TaskFailed(
                f"the metric `{self.name}` raised {type(problem).__name__}",
                private=str(problem) or None,
            ) from problem


def numbers(name: str, value: Any) -> dict[str, float]:
    """A metric's result as named numbers.

    Of several entries, `name` is the mean of those that are not NaN, and `name_0`, `name_1`, … are
    the entries.  A dictionary gives one name per key.
    """
    if isinstance(value, Mapping):
        parts = [numbers(f"{name}_{key}", part) for key, part in value.items()]
        return {key: number for part in parts for key, number in part.items()}
    entries = torch.as_tensor(value).detach().cpu().double()
    if entries.numel() == 0:
        raise TaskFailed(f"the metric `{name}` returned no number", hint="correct it in the task")
    if entries.numel() == 1:
        return {name: float(entries)}
    found = {name: float(_mean(entries))}
    if entries.ndim == 1 and len(entries) <= CLASSES_NAMED_MAX:
        found |= {f"{name}_{index}": float(entry) for index, entry in enumerate(entries)}
    return found


def _mean(value: Any) -> Tensor:
    return torch.as_tensor(value).detach().cpu().double().nanmean()
