"""Which tensors of a model cross the wire, and under which name.

Floating entries of the state dict that match a pattern of `include` and none of `exclude`.  Tied
weights (names for the very same memory, as a head that is its own embedding) travel once, under
their first name: so no peer can give two values to what is one tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from lightyear_node.errors import ConfigError
from lightyear_node.learning.weights import DTYPE_NAMES

EVERYTHING = ("*",)
NAMES_SHOWN = 8
"""Of a model's tensors, in an error: enough to see how its names are made."""


@dataclass(frozen=True, slots=True)
class Selection:
    tensors: Mapping[str, Tensor]
    """They share memory with the module."""
    tied: Mapping[str, str]
    """Every further name of any tensor of the model, and the tensor's first name."""
    idle: tuple[str, ...]
    """Patterns of `exclude` that match nothing."""


def select(
    module: nn.Module, include: Sequence[str] = EVERYTHING, exclude: Sequence[str] = ()
) -> Selection:
    """A tensor of several names is included by any of them, and excluded by any of them.

    Integer buffers (`num_batches_tracked`) stay at home.
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
    idle = tuple(pattern for pattern in exclude if not _matching(state, pattern))
    return Selection(chosen, tied, idle)


def exchanged(
    module: nn.Module, exclude: Sequence[str] = (), include: Sequence[str] = EVERYTHING
) -> dict[str, Tensor]:
    """The tensors that cross the wire, each under its first name."""
    return dict(select(module, include, exclude).tensors)


def tied_names(module: nn.Module) -> dict[str, str]:
    """Further names of tensors that have an earlier one: the same memory, seen the same way."""
    first: dict[object, str] = {}
    tied: dict[str, str] = {}
    for name, value in _tensors(module).items():
        if not value.numel():
            continue  # nothing is not the same as nothing: empty tensors have no memory
        place = (value.device, value.dtype, value.data_ptr(), value.shape, value.stride())
        if first.setdefault(place, name) != name:
            tied[name] = first[place]
    return tied


def twin(module: nn.Module) -> nn.Module:
    """A copy in which the same tensors are tied; torch's own copy may part some of them."""
    made = copy.deepcopy(module)
    copied = made.state_dict(keep_vars=True)
    for name, first in tied_names(module).items():
        copied[name].data = copied[first].data
    return made


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """A state dict may also hold what a layer calls its extra state."""
    state = module.state_dict()
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
