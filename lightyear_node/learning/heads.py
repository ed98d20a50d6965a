"""Finding a network's final layer, θ^(L) of the paper, and how its kernel may be computed.

    J_θ(x) = ∂h(θ;x) / ∂θ^(L)

The head is the last module with a weight that the output depends on, found by watching one small
forward pass, or the one the task names.  "The last tensor of parameters()" would be a bias alone:
its kernel is constant and says nothing.

A head whose output *is* the model's output has a closed form (see `agreement`); anything else
(an activation or upsampling behind it, tied or re-parametrised weights, a second call) is GENERAL.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from lightyear_node.learning.forward import at_rest, logits_of, unpack

EXAMPLE_ROWS_MAX = 2
"""Enough to see whether the batch dimension survives; more would only cost time."""


class Kind(StrEnum):
    LINEAR = "linear"
    CONV = "conv"
    GENERAL = "general"


@dataclass(frozen=True, slots=True)
class Head:
    """A dotted module name ("" is the model itself) and the form of its kernel."""

    name: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    output: Any
    version: int
    """Torch's count of in-place changes to the output when the module returned it."""


def find_head(model: nn.Module, batch: Any, name: str | None = None) -> Head:
    """The final layer of a model, seen on one batch; within the submodule `name` if one is named.

    Raises ValueError, saying what to do, when no layer qualifies.
    """
    if name is not None:
        _check_name(model, name)
    output, calls, reached = _trace(model, _few(unpack(batch)[0]))
    inside = [call for call in calls if name is None or _within(call.name, name)]
    for call in reversed(inside):
        untouched = _is_untouched(call, output)
        if untouched or call.name in reached:
            once = sum(other.name == call.name for other in calls) == 1
            closed = untouched and once
            return Head(call.name, _closed_kind(model, call.name) if closed else Kind.GENERAL)
    if name is not None and any(True for _ in model.get_submodule(name).parameters()):
        return Head(name, Kind.GENERAL)  # used as a plain function: its call cannot be watched
    raise ValueError(
        "no layer with a weight was found that the model's output depends on; "
        'name the final layer with head="…", one of: '
        + ", ".join(n for n, m in model.named_modules() if n and _has_weight(m))
    )


def head_parameters(model: nn.Module, head: Head) -> dict[str, Tensor]:
    """θ^(L), by the names that `torch.func.functional_call` takes."""
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if _within(name, head.name) and parameter.is_floating_point()
    }


def _trace(model: nn.Module, inputs: Any) -> tuple[Tensor, list[_Call], set[str]]:
    """One forward pass: the output, the weighted modules in calling order, and those it needs."""
    calls: list[_Call] = []
    weighted = {name: module for name, module in model.named_modules() if _has_weight(module)}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            version = output._version if isinstance(output, Tensor) else -1
            calls.append(_Call(name, output, version))

        return hook

    # Fresh leaves, so that frozen parameters are seen and the user's gradients are left alone.
    leaves = {
        name: parameter.detach().requires_grad_()
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
    }
    by_parameter = {id(p): leaves[n] for n, p in model.named_parameters() if n in leaves}
    handles = [module.register_forward_hook(watch(name)) for name, module in weighted.items()]
    try:
        with at_rest(model), torch.enable_grad():
            output = logits_of(_Substituted(model, leaves), inputs)
            needed = _needed(output, leaves)
    finally:
        for handle in handles:
            handle.remove()
    reached = {
        name
        for name, module in weighted.items()
        if any(id(by_parameter.get(id(p))) in needed for p in module.parameters())
    }
    return output, calls, reached


class _Substituted(nn.Module):
    """A model run with other parameters than its own."""

    def __init__(self, model: nn.Module, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        self.inner = model
        self.substitutes = parameters

    def forward(self, inputs: Any) -> Any:
        return functional_call(self.inner, self.substitutes, (inputs,))


def _needed(output: Tensor, leaves: dict[str, Tensor]) -> set[int]:
    if not output.requires_grad:
        return set()
    gradients = torch.autograd.grad(output.sum(), list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.values(), gradients, strict=True)
    return {id(leaf) for leaf, gradient in pairs if gradient is not None}


def _is_untouched(call: _Call, output: Tensor) -> bool:
    """Whether the model returned the head's output itself, at most reshaped within each sample.

    Values cannot tell (a ReLU may leave an example as it is); memory can: the same storage, no
    in-place change since, and the same distance from one sample to the next.
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


def _closed_kind(model: nn.Module, name: str) -> Kind:
    module = model.get_submodule(name)
    if parametrize.is_parametrized(module) or _is_tied(model, module):
        return Kind.GENERAL
    if module._forward_pre_hooks or module._forward_hooks:  # old-style weight norm, and strangers
        return Kind.GENERAL
    forward = type(module).forward
    if isinstance(module, nn.Linear) and forward is nn.Linear.forward:
        return Kind.LINEAR
    for conv in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        if isinstance(module, conv) and forward is conv.forward and module.padding_mode == "zeros":
            return Kind.CONV
    return Kind.GENERAL


def _is_tied(model: nn.Module, module: nn.Module) -> bool:
    """Whether another module holds one of these parameters too."""
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


def _few(inputs: Any) -> Any:
    return inputs[:EXAMPLE_ROWS_MAX] if isinstance(inputs, Tensor) else inputs


def _check_name(model: nn.Module, name: str) -> None:
    names = [known for known, _ in model.named_modules()]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        suggestion = f'; did you mean "{near[0]}"?' if near else ""
        raise ValueError(f'the model has no module "{name}"{suggestion}')
