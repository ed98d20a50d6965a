"""What a forward pass over a validation set needs: batches taken apart, and a model at rest.

A batch is a tensor of inputs, a pair (inputs, labels), or a mapping with "image" and "label".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

OnLogits = Callable[[int, Tensor], None]
"""Called with a batch's index and its logits, once per batch, from the pass that scores."""


def unpack(batch: Any) -> tuple[Any, Any]:
    """(inputs, labels); labels are None where the batch has none."""
    if isinstance(batch, Mapping):
        if "image" not in batch:
            raise ValueError('a dictionary batch needs the keys "image" and "label"')
        return batch["image"], batch.get("label")
    if isinstance(batch, tuple | list):
        return batch[0], batch[1] if len(batch) > 1 else None
    return batch, None


def batch_rows(batch: Any) -> int:
    """How many samples a batch has: the length of the first tensor among its inputs."""
    inputs = unpack(batch)[0]
    while not isinstance(inputs, Tensor):
        inputs = next(iter(inputs.values() if isinstance(inputs, Mapping) else inputs))
    return len(inputs)


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors, also inside tuples, lists and dictionaries, moved; anything else as it is."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        moved = [to_device(item, device) for item in value]
        return moved if isinstance(value, list) else tuple(moved)
    return value


def device_of(model: nn.Module) -> torch.device:
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def logits_of(model: nn.Module, inputs: Any) -> Tensor:
    """The model's output, (n, …); anything but one tensor is refused."""
    output = model(to_device(inputs, device_of(model)))
    if not isinstance(output, Tensor):
        raise ValueError(
            f"the model returned {type(output).__name__}; "
            "wrap it in a module that returns its logits as one tensor"
        )
    return output


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; each submodule then gets back the mode it was found in."""
    found = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in found:
            module.training = training
