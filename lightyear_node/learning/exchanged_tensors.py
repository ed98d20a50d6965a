"""Selects the tensors of a model that are exchanged, and their names.

These are the floating-point entries of the state dict that match a pattern of `include` and none of
`exclude`.  Tied weights (several names for the same memory, as a final layer that shares the
embedding's) are sent once, under their first name, so that no peer can give one tensor two values.
Names are those of the model without wrappers (see `wrappers`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from lightyear_node.errors import ConfigError
from lightyear_node.learning.weights import DTYPE_NAMES
from lightyear_node.learning.wrappers import without_wrappers

EVERYTHING = ("*",)
NAMES_SHOWN = 8
"""Names listed in an error message."""


@dataclass(frozen=True, slots=True)
class ExchangedTensors:
    tensors: Mapping[str, Tensor]
    """By first name; they share memory with the module."""
    tied: Mapping[str, str]
    """Further name → first name, of every tied tensor of the model."""
    unmatched: tuple[str, ...]
    """Patterns of `exclude` that match no tensor."""


def select(
    module: nn.Module, include: Sequence[str] = EVERYTHING, exclude: Sequence[str] = ()
) -> ExchangedTensors:
    """Any name of a tied tensor includes it, and any name excludes it.

    Integer buffers (`num_batches_tracked`) are not exchanged.
    """
    state = _tensors(module)
    tied = tied_names(module)
    for pattern in include:
        if not _matching(state, pattern):
            raise ConfigError(
                f"exchange.include: no tensor of the model matches {pattern!r}",
                hint="correct it in peers.yaml; the model has " + _shown(state),
            )
    included = {tied.get(name, name) for glob in include for name in _matching(state, glob)}
    excluded = {tied.get(name, name) for glob in exclude for name in _matching(state, glob)}
    chosen = {
        name: _exchangeable(name, value)
        for name, value in state.items()
        if name in included - excluded and (value.is_floating_point() or value.is_complex())
    }
    if not chosen:
        raise ConfigError(
            "no tensor is left to exchange",
            hint="check `exchange.include` and `exchange.exclude` in peers.yaml; the model has "
            + _shown(state),
        )
    unmatched = tuple(pattern for pattern in exclude if not _matching(state, pattern))
    return ExchangedTensors(chosen, tied, unmatched)


def exchanged(
    module: nn.Module, exclude: Sequence[str] = (), include: Sequence[str] = EVERYTHING
) -> dict[str, Tensor]:
    """The exchanged tensors, each under its first name."""
    return dict(select(module, include, exclude).tensors)


def tied_names(module: nn.Module) -> dict[str, str]:
    """Further name → first name, for names of the same memory with the same shape and strides."""
    first: dict[object, str] = {}
    tied: dict[str, str] = {}
    for name, value in _tensors(module).items():
        if not value.numel():
            continue  # empty tensors have no memory to compare
        place = (value.device, value.dtype, value.data_ptr(), value.shape, value.stride())
        if first.setdefault(place, name) != name:
            tied[name] = first[place]
    return tied


def copy_with_ties(module: nn.Module) -> nn.Module:
    """A copy in which the same tensors are tied; `deepcopy` may separate some of them."""
    made = copy.deepcopy(without_wrappers(module))
    copied = made.state_dict(keep_vars=True)
    for name, first in tied_names(module).items():
        copied[name].data = copied[first].data
    return made


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Tensors of the state dict, which may also contain a layer's extra state."""
    state = without_wrappers(module).state_dict()
    return {name: value.detach() for name, value in state.items() if isinstance(value, Tensor)}


def _matching(state: Mapping[str, Tensor], pattern: str) -> list[str]:
    return [name for name in state if fnmatchcase(name, pattern)]


def _exchangeable(name: str, value: Tensor) -> Tensor:
    if value.dtype not in DTYPE_NAMES:
        raise ConfigError(
            f"the tensor {name} is {value.dtype}, which cannot be exchanged",
            hint="convert it in the task, or add it to `exchange.exclude` in peers.yaml",
        )
    return value


def _shown(state: Mapping[str, Tensor]) -> str:
    names = list(state)
    return ", ".join(names[:NAMES_SHOWN]) + (", …" if len(names) > NAMES_SHOWN else "")
