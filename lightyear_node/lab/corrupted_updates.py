"""Computes the updates of malfunctioning sites; `malfunctions` lists the kinds.

`label-flip`, `stale` and `free-rider` need more than the update: see `faulty_site`.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightyear_node.errors import InvalidTask, TaskFailed
from lightyear_node.lab.malfunctions import Malfunction
from lightyear_node.learning.validation import IGNORED_LABEL
from lightyear_node.learning.weights import Layout, other_names
from lightyear_node.learning.wrappers import without_wrappers
from lightyear_node.worker.task import Task

ANA_STRENGTH = 120.5
"""Percent; the paper's value for all datasets except Camelyon17 (1.5)."""
NOISE_SIGMA = 0.1
HEAD_FACTOR = 100.0
BIAS_SHIFT = 10.0
"""In logits: multiplies the odds of one class by e¹⁰."""
STALE_ROUNDS = 3


def corrupt(
    kind: Malfunction | str,
    tensors: Mapping[str, Tensor],
    *,
    seed: int,
    round: int = 0,
    scale: float | None = None,
    fresh: Callable[[], nn.Module] | nn.Module | None = None,
    head: str | None = None,
) -> dict[str, Tensor]:
    """Return the update that a site with this malfunction sends instead of `tensors`.

    Deterministic in seed and round.  The meaning of `scale` depends on the kind; that of `dynamic`
    is the strength of its noise.  `random` and `dynamic` need `fresh`: a factory, or a module whose
    layers have `reset_parameters`.  The malfunctions of the head need `head`, the name of the final
    layer.
    """
    kind = Malfunction(kind)
    generator = torch.Generator().manual_seed(_seed(seed, round))
    if kind is Malfunction.DYNAMIC:
        choices = (Malfunction.ANA, Malfunction.SFA, Malfunction.RANDOM)
        kind = choices[int(torch.randint(len(choices), (), generator=generator))]
        scale = scale if kind is Malfunction.ANA else None
    match kind:
        case Malfunction.ANA:
            share = _or_default(scale, ANA_STRENGTH) / 100
            return {name: t * (1 + share * _noise(t, generator)) for name, t in tensors.items()}
        case Malfunction.NOISE:
            sigma = _or_default(scale, NOISE_SIGMA)
            return {name: t + sigma * _noise(t, generator) for name, t in tensors.items()}
        case Malfunction.SFA:
            return {name: -_or_default(scale, 1.0) * t for name, t in tensors.items()}
        case Malfunction.RANDOM:
            return _redrawn(tensors, fresh, int(torch.randint(1 << 62, (), generator=generator)))
        case Malfunction.NAN:
            return {name: torch.full_like(t, torch.nan) for name, t in tensors.items()}
        case Malfunction.HEAD_FLIP:
            return _head_times(tensors, head, -1.0)
        case Malfunction.HEAD_SCALE:
            return _head_times(tensors, head, _or_default(scale, HEAD_FACTOR))
        case Malfunction.BIAS_SHIFT:
            return _bias_shifted(tensors, head, _or_default(scale, BIAS_SHIFT), generator)
    raise ValueError(f"{kind} needs more than the weights: the worker makes it")


def _or_default(given: float | None, default: float) -> float:
    return default if given is None else given


def _seed(seed: int, round: int) -> int:
    digest = hashlib.sha256(f"malfunction/{seed}/{round}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator).to(like.device, like.dtype)


def _redrawn(
    tensors: Mapping[str, Tensor], fresh: Callable[[], nn.Module] | nn.Module | None, seed: int
) -> dict[str, Tensor]:
    if fresh is None:
        raise ValueError("a random network needs `fresh`: a factory, or a module to reset")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _reset(fresh) if isinstance(fresh, nn.Module) else fresh()
    state = without_wrappers(module).state_dict()
    drawn = {name: state[name].detach().to(t.device) for name, t in tensors.items()}
    Layout.of(tensors).check(drawn)
    return drawn


def _reset(module: nn.Module) -> nn.Module:
    """Return a copy with every layer reinitialised."""
    module = copy.deepcopy(module)
    for name, layer in module.named_modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
        elif any(True for _ in layer.parameters(recurse=False)):
            raise InvalidTask(f'layer "{name}" cannot reset itself: pass a factory as `fresh`')
    return module


def _head_times(
    tensors: Mapping[str, Tensor], head: str | None, factor: float
) -> dict[str, Tensor]:
    head_names = set(_head_tensors(tensors, head).values())
    return {n: t * factor if n in head_names else t.clone() for n, t in tensors.items()}


def _bias_shifted(
    tensors: Mapping[str, Tensor], head: str | None, shift: float, generator: torch.Generator
) -> dict[str, Tensor]:
    """Shift the bias of one class; the softmax ignores a shift common to all classes."""
    bias = _head_tensors(tensors, head).get(f"{head}.bias")
    if bias is None:
        raise InvalidTask("a shifted bias needs a final layer that has one")
    shifted = {name: tensor.clone() for name, tensor in tensors.items()}
    shifted[bias][int(torch.randint(len(shifted[bias]), (), generator=generator))] += shift
    return shifted


def _head_tensors(tensors: Mapping[str, Tensor], head: str | None) -> dict[str, str]:
    """Map the final layer's tensor names to the exchanged names, which differ if tied."""
    names = {name: name for name in tensors} | dict(other_names(tensors))
    found = {
        own_name: name
        for own_name, name in names.items()
        if head is not None and own_name.startswith(f"{head}.") and name in tensors
    }
    if not found:
        raise ValueError("a malfunction of the head needs the name of the final layer")
    return found


def with_flipped_labels(task: Task) -> Task:
    """Return the task with every label replaced by another class: c becomes c + C/2 modulo C.

    Masks are labels of pixels.  The loss raises `InvalidTask` for labels that are not classes.
    """
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
        return loss(logits, _flipped(logits, y))

    return on_flipped


def _flipped(logits: Tensor, y: Tensor) -> Tensor:
    if classes := _classes(logits, y):
        # In a wider type: byte masks would overflow.
        wide = y.long()
        ignored = y == IGNORED_LABEL
        if bool((ignored | (y == wide) & (wide >= 0) & (wide < classes)).all()):
            return torch.where(ignored, wide, (wide + classes // 2) % classes).to(y.dtype)
    raise InvalidTask(
        "label-flip: the labels are not class indices, nor 0 and 1",
        hint="a regression has no labels to flip: choose another malfunction",
    )


def _classes(logits: Tensor, y: Any) -> int:
    """Number of classes, or 0 if the targets do not have the shape of labels."""
    if not isinstance(y, Tensor) or y.is_complex():
        return 0
    if y.numel() == logits.numel():
        return 2  # one logit per label
    per_sample = logits.ndim > 1 and y.ndim in (logits.ndim - 1, logits.ndim)
    return logits.shape[1] if per_sample and y.numel() * logits.shape[1] == logits.numel() else 0
