"""Checks and copies of what a training script hands over: models, metrics, sample counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightyear_node.errors import InvalidTask


def plain_model(model: object) -> nn.Module:
    """The model itself, without the wrappers that add a prefix to every name."""
    if not isinstance(model, nn.Module):
        raise InvalidTask(
            f"the model is a {type(model).__name__}, not a torch.nn.Module",
            hint="give the verbs the model that `init` got",
        )
    parallel = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    inner = getattr(model, "module" if parallel else "_orig_mod", None)
    return model if inner is None else plain_model(inner)


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def refuse_other_tensors(expected: Mapping[str, tuple[int, ...]], model: nn.Module) -> None:
    """Raise `InvalidTask` unless the model has the tensors that it had at `init`."""
    found = shapes_of(model)
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) == found.get(name):
            continue
        if name not in found:
            about = f"tensor {name} is missing"
        elif name not in expected:
            about = f"tensor {name} is new"
        else:
            about = f"tensor {name} was {expected[name]} and is {found[name]}"
        raise InvalidTask(
            f"the model has changed since `init`: {about}",
            hint="all sites exchange the tensors that the model has at `init`: build it completely"
            " before, and do not replace its layers",
        )


@torch.no_grad()
def copy_tensors(source: Mapping[str, Tensor], target: nn.Module) -> None:
    """Copy these tensors into those of the same names."""
    own = target.state_dict()
    for name, tensor in source.items():
        own[name].copy_(tensor)


@contextmanager
def modes_kept(model: nn.Module | Callable[[], nn.Module]) -> Iterator[None]:
    """Restore which modules are in training mode: judging and metrics change it."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [module.training for module in modules]
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


def checked_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as plain numbers; raises `InvalidTask` that names the one that is none."""
    if not isinstance(metrics, Mapping):
        raise InvalidTask(
            f"`send`: metrics is a {type(metrics).__name__}, not a dict",
            hint='write `send(model, metrics={"dice": 0.8})`',
        )
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise InvalidTask(
                f"`send`: the metric {str(name)[:80]} is a {type(value).__name__}, not a number",
                hint="give one number for each metric",
            ) from None
    return numbers


def checked_samples(samples: object) -> int:
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 0:
        shown = samples if isinstance(samples, int | float) else type(samples).__name__
        raise InvalidTask(
            f"`send`: samples is {shown}, not a number of samples",
            hint="give a whole number, 0 or more: `send(model, samples=len(train_set))`",
        )
    return samples
