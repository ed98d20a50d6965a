"""Helpers for forward passes over a validation set.

A batch is a tensor of inputs, a pair (inputs, labels), or a mapping with "image" and "label".
Inputs are a tensor, or tuples, lists and dictionaries of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightyear_node.errors import InvalidTask

OnOutput = Callable[[int, Any], None]
"""Called once per batch, with the batch's index and what the model returned."""


class KeywordInputs(dict[str, Any]):
    """Inputs that a model takes by name, `model(**inputs)`, as Hugging Face's models do."""


def unpack(batch: Any) -> tuple[Any, Any]:
    """(inputs, labels); labels are None if the batch has none."""
    if isinstance(batch, Mapping):
        if "image" not in batch:
            raise InvalidTask('a dictionary batch needs the keys "image" and "label"')
        return batch["image"], batch.get("label")
    if isinstance(batch, tuple | list):
        return batch[0], batch[1] if len(batch) > 1 else None
    return batch, None


def batch_rows(batch: Any) -> int:
    """Number of samples: the length of the first tensor among the inputs."""
    return rows_of(unpack(batch)[0])


def rows_of(inputs: Any) -> int:
    lengths: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        lengths.append(len(tensor) if tensor.ndim else 0)
        return tensor

    map_tensors(note, inputs)
    if not lengths:
        raise InvalidTask(
            f"the inputs of a batch are {type(inputs).__name__} without a tensor",
            hint="give Task(prepare_batch=...) that returns (input, target)",
        )
    return lengths[0]


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a function to every tensor, also inside tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        made = {key: map_tensors(function, item) for key, item in value.items()}
        return KeywordInputs(made) if isinstance(value, KeywordInputs) else made
    if isinstance(value, tuple | list):
        items = [map_tensors(function, item) for item in value]
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*items)
        return items if isinstance(value, list) else tuple(items)
    return value


def to_device(value: Any, device: torch.device) -> Any:
    """Move every tensor; subclasses such as MONAI's MetaTensor become plain tensors."""

    def move(tensor: Tensor) -> Tensor:
        plain = tensor if type(tensor) is Tensor else tensor.as_subclass(Tensor)
        return plain.to(device)

    return map_tensors(move, value)


def first_rows(inputs: Any, count: int) -> Any:
    """The first samples of inputs; tensors that are not one entry per sample stay whole."""
    rows = rows_of(inputs)
    return map_tensors(lambda one: one[:count] if one.ndim and len(one) == rows else one, inputs)


def device_of(model: nn.Module) -> torch.device:
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def call(model: nn.Module, inputs: Any) -> Any:
    """What the model returns; the inputs must be on its device."""
    return model(**inputs) if isinstance(inputs, KeywordInputs) else model(inputs)


def output_of(model: nn.Module, inputs: Any) -> Any:
    """What the model returns; the inputs are moved to its device."""
    return call(model, to_device(inputs, device_of(model)))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; restores the mode of each submodule at the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
