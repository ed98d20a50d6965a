"""Attacks on single layers of the honest update."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from lightyear_node.errors import InvalidTask
from lightyear_node.lab.attacks.colluding import batches_of
from lightyear_node.lab.attacks.loss_gradient import network
from lightyear_node.lab.attacks.option_values import positive, whole
from lightyear_node.lab.attacks.victim import MARGIN, choose_victim
from lightyear_node.lab.attacks.weights_math import Tensors
from lightyear_node.lab.malfunction_plugins import AttackContext
from lightyear_node.learning.final_layer import find_final_layers
from lightyear_node.worker.task import Task

NORMALIZATIONS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm)
WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
HOMOGENEOUS = (
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.Dropout,
    nn.Dropout2d,
    nn.Flatten,
    nn.Identity,
    nn.LeakyReLU,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.ReLU,
)
"""Modules f with f(c x) = c f(x) for every c > 0."""


def clipped_bias(
    update: Tensors, context: AttackContext, target: int = 0, victim: str | None = None
) -> dict[str, Tensor]:
    """The honest update with the victim's final bias, raised for one class as far as is allowed.

    Of a single logit, class 0 lowers the bias and class 1 raises it.
    """
    chosen = choose_victim(context, victim)
    message = {name: tensor.clone() for name, tensor in update.items()}
    if chosen is None:
        return message
    name = f"{_final_layer(context.task)}.bias"
    if name not in message:
        raise InvalidTask(
            "the final layer has no bias that is exchanged", hint="choose another attack"
        )
    bias = chosen.update[name].clone()
    place, sign = _logit(whole("target", target), len(bias))
    bias[place] += sign * MARGIN * chosen.limits.limits[name] * chosen.limits.scales[name]
    message[name] = bias
    return message


def layer_swap(
    update: Tensors, context: AttackContext, layer: str | None = None, shift: int = 1
) -> dict[str, Tensor]:
    """The honest update with the outputs of a layer exchanged: its rows, moved by `shift` places.

    By default of the final layer.  A layer with a single row has its columns exchanged.
    """
    name = _final_layer(context.task) if layer is None else layer
    if f"{name}.weight" not in update:
        known = [one.removesuffix(".weight") for one in update if one.endswith(".weight")]
        raise InvalidTask(
            f"the update has no weight of a layer {name!r}", hint=f"it has {', '.join(known)}"
        )
    places = whole("shift", shift, at_least=1)
    message = {one: tensor.clone() for one, tensor in update.items()}
    rows = len(message[f"{name}.weight"]) > 1
    for part in ("weight", "bias") if rows else ("weight",):
        if f"{name}.{part}" in message:
            tensor = message[f"{name}.{part}"]
            message[f"{name}.{part}"] = tensor.roll(places, 0 if rows else 1)
    return message


def rescale(update: Tensors, context: AttackContext, factor: float = 1.4) -> dict[str, Tensor]:
    """The same function with other weights: a layer times c, the next one divided by c.

    For all disjoint pairs of layers with only ReLU, pooling and the like between them.  The message
    performs like the honest update, but its mean with other models does not.
    """
    by = positive("factor", factor)
    message = {name: tensor.clone() for name, tensor in update.items()}
    done: set[str] = set()
    for first, second in _homogeneous_pairs(network(context.task)):
        scaled = {f"{first}.weight": by, f"{first}.bias": by, f"{second}.weight": 1 / by}
        present = scaled.keys() & message.keys()
        whole_pair = {f"{first}.weight", f"{second}.weight"} <= present
        if whole_pair and not {first, second} & done:
            done |= {first, second}
            for name in present:
                message[name] = message[name] * scaled[name]
    if not done:
        raise InvalidTask(
            "the network has no two layers in a row that can be rescaled",
            hint="it needs an nn.Sequential in which only ReLU, pooling, dropout or flattening "
            "stand between two layers",
        )
    return message


def _final_layer(task: Task) -> str:
    batch = batches_of([task], "val_data")[0]
    return find_final_layers(network(task), batch, task.head, task.output)[0].name


def _logit(target: int, logits: int) -> tuple[int, float]:
    """Which logit to change for a class, and in which direction."""
    classes = max(2, logits)
    if target >= classes:
        raise InvalidTask(f"option target is {target}, but there are {classes} classes")
    return (target, 1.0) if logits > 1 else (0, 1.0 if target else -1.0)


def _homogeneous_pairs(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of a layer and the next one, if scaling the first only scales the second's input."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Sequential):
            before: str | None = None
            for child_name, child in module.named_children():
                path = f"{name}.{child_name}" if name else child_name
                if isinstance(child, WEIGHTED) and before is not None:
                    yield before, path
                if isinstance(child, (*WEIGHTED, *NORMALIZATIONS)):
                    before = path
                elif not isinstance(child, HOMOGENEOUS):
                    before = None
