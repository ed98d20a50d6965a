"""Finds a network's final layer, θ^(L) of the paper, and the form of its kernel.

    J_θ(x) = ∂h(θ;x) / ∂θ^(L)

It is the last module with a weight that the output depends on, found by tracing a small forward
pass, or the one that the task names.  The last tensor of parameters() would be a bias alone, whose
kernel is constant.

A layer whose output *is* the model's output has a closed form (see `agreement`); any other (with an
activation or upsampling behind it, tied or re-parametrized weights, a second call) is GENERAL.

A model with several heads has one final layer for each of its predictions (see `outputs`).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from lightyear_node.errors import InvalidTask
from lightyear_node.learning.forward import evaluation_mode, first_rows, output_of, unpack
from lightyear_node.learning.outputs import HINT, Choice, predictions

EXAMPLE_ROWS_MAX = 2
"""Enough to see whether the batch dimension is kept."""


class FinalLayerKind(StrEnum):
    LINEAR = "linear"
    CONV = "conv"
    GENERAL = "general"


@dataclass(frozen=True, slots=True)
class FinalLayer:
    """A dotted module name ("" is the model itself) and the form of its kernel."""

    name: str
    kind: FinalLayerKind
    entry: str = ""
    """The name of the prediction that it computes."""
    choice: Choice | None = None
    """How the predictions are found in the model's output."""

    def prediction(self, output: Any) -> Tensor:
        """Its prediction, (n, …), in what the model returned."""
        found = predictions(output, self.choice)
        if self.entry not in found:
            raise InvalidTask(
                f"the model's output has no entry {self.entry!r} for some batches", hint=HINT
            )
        return found[self.entry]


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    output: Any
    version: int
    """Torch's counter of in-place changes to the output, when the module returned it."""


@dataclass(frozen=True, slots=True)
class _Trace:
    predictions: dict[str, Tensor]
    calls: list[_Call]
    """Of modules with a weight, in order."""
    reached: dict[str, set[str]]
    """The modules that each prediction depends on."""


def find_final_layers(
    model: nn.Module, batch: Any, name: str | None = None, choice: Choice | None = None
) -> tuple[FinalLayer, ...]:
    """The final layer of each prediction, traced on one batch.

    With `name`, the one within that submodule.  Raises `InvalidTask` if no layer qualifies.
    """
    if name is not None:
        _check_name(model, name)
    traced = _trace(model, first_rows(unpack(batch)[0], EXAMPLE_ROWS_MAX), choice)
    found = {entry: _last_layer(model, traced, entry, name) for entry in traced.predictions}
    layers = {entry: layer for entry, layer in found.items() if layer is not None}
    if name is not None:
        if layers:
            # A shared layer serves several predictions: prefer the one that it returns itself.
            closed = [one for one in layers.values() if one.kind is not FinalLayerKind.GENERAL]
            return (replace((closed or list(layers.values()))[0], choice=choice),)
        if any(True for _ in model.get_submodule(name).parameters()):
            # Called as a plain function, which hooks do not see.
            entry = next(iter(traced.predictions))
            return (FinalLayer(name, FinalLayerKind.GENERAL, entry, choice),)
    missing = [entry for entry in found if entry not in layers]
    if missing:
        raise _no_layer(model, missing[0], len(found))
    return tuple(replace(layer, choice=choice) for layer in layers.values())


def _last_layer(
    model: nn.Module, traced: _Trace, entry: str, name: str | None
) -> FinalLayer | None:
    """The last layer that a prediction depends on, within the submodule `name` if given."""
    output, reached = traced.predictions[entry], traced.reached[entry]
    for call in reversed(traced.calls):
        if name is not None and not _within(call.name, name):
            continue
        untouched = _is_untouched(call, output)
        if untouched or call.name in reached:
            once = sum(other.name == call.name for other in traced.calls) == 1
            closed = untouched and once
            kind = _closed_kind(model, call.name) if closed else FinalLayerKind.GENERAL
            return FinalLayer(call.name, kind, entry)
    return None


def _no_layer(model: nn.Module, entry: str, predictions: int) -> InvalidTask:
    if predictions > 1:
        return InvalidTask(
            f"entry {entry!r} of the model's output depends on no layer with a weight", hint=HINT
        )
    return InvalidTask(
        "no layer with a weight was found that the model's output depends on; "
        'name the final layer with head="…", one of: '
        + ", ".join(n for n, m in model.named_modules() if n and _has_weight(m))
    )


def final_layer_parameters(model: nn.Module, final_layer: FinalLayer) -> dict[str, Tensor]:
    """θ^(L), by the names that `torch.func.functional_call` takes."""
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if _within(name, final_layer.name) and parameter.is_floating_point()
    }


def _trace(model: nn.Module, inputs: Any, choice: Choice | None) -> _Trace:
    """One forward pass, and the gradients of each prediction."""
    calls: list[_Call] = []
    weighted = {name: module for name, module in model.named_modules() if _has_weight(module)}

    def record(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            version = output._version if isinstance(output, Tensor) else -1
            calls.append(_Call(name, output, version))

        return hook

    # New leaves: frozen parameters get gradients too, and the user's gradients stay unchanged.
    leaves = {
        name: parameter.detach().requires_grad_()
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
    }
    by_parameter = {id(p): leaves[n] for n, p in model.named_parameters() if n in leaves}
    handles = [module.register_forward_hook(record(name)) for name, module in weighted.items()]
    try:
        with evaluation_mode(model), torch.enable_grad():
            output = output_of(_Substituted(model, leaves), inputs)
            found = predictions(output, choice)
            needed = {entry: _needed(tensor, leaves) for entry, tensor in found.items()}
    finally:
        for handle in handles:
            handle.remove()
    reached = {
        entry: {
            name
            for name, module in weighted.items()
            if any(id(by_parameter.get(id(p))) in needed[entry] for p in module.parameters())
        }
        for entry in found
    }
    return _Trace(found, calls, reached)


class _Substituted(nn.Module):
    """A model run with other parameters in place of its own."""

    def __init__(self, model: nn.Module, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        self.inner = model
        self.substitutes = parameters

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return functional_call(self.inner, self.substitutes, inputs, named)


def _needed(output: Tensor, leaves: dict[str, Tensor]) -> set[int]:
    if not output.requires_grad:
        return set()
    gradients = torch.autograd.grad(
        output.sum(), list(leaves.values()), allow_unused=True, retain_graph=True
    )
    pairs = zip(leaves.values(), gradients, strict=True)
    return {id(leaf) for leaf, gradient in pairs if gradient is not None}


def _is_untouched(call: _Call, output: Tensor) -> bool:
    """Whether the model returned the layer's output itself, at most reshaped within each sample.

    Compares memory: the same storage, no in-place change since, the same stride between samples.
    Comparing values would not do: a ReLU may leave an example unchanged.
    """
    own = call.output
    return (
        isinstance(own, Tensor)
        and own.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
        and own._version == call.version
        and own.numel() == output.numel()
        and own.ndim > 1
        and own.shape[0] == output.shape[0]
        and own.stride(0) == output.stride(0)
    )


def _closed_kind(model: nn.Module, name: str) -> FinalLayerKind:
    module = model.get_submodule(name)
    if parametrize.is_parametrized(module) or _is_tied(model, module):
        return FinalLayerKind.GENERAL
    if module._forward_pre_hooks or module._forward_hooks:  # such as old-style weight norm
        return FinalLayerKind.GENERAL
    forward = type(module).forward
    if isinstance(module, nn.Linear) and forward is nn.Linear.forward:
        return FinalLayerKind.LINEAR
    for conv in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        if isinstance(module, conv) and forward is conv.forward and module.padding_mode == "zeros":
            return FinalLayerKind.CONV
    return FinalLayerKind.GENERAL


def _is_tied(model: nn.Module, module: nn.Module) -> bool:
    """Whether another module has one of these parameters too."""
    own = {id(parameter) for parameter in module.parameters()}
    holders = [id(p) for _, p in model.named_parameters(remove_duplicate=False) if id(p) in own]
    return len(holders) != len(own)


def _has_weight(module: nn.Module) -> bool:
    if parametrize.is_parametrized(module, "weight"):
        return True
    return isinstance(getattr(module, "weight", None), Tensor) and any(
        True for _ in module.parameters(recurse=False)
    )


def _within(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(prefix + ".")


def _check_name(model: nn.Module, name: str) -> None:
    names = [known for known, _ in model.named_modules()]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        suggestion = f'; did you mean "{near[0]}"?' if near else ""
        raise InvalidTask(f'the model has no module "{name}"{suggestion}')
