"""The training state file: what training keeps between rounds besides the exchanged tensors.

It holds the optimizer's state, or the objects that a training script keeps, the tensors that are
not exchanged (integer counters, excluded ones) and, under some rules, a personal model.  It is
written with every update, so that a restarted site continues exactly.  A safetensors file: tensors
by name, all other values as JSON in the header.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightyear_node.errors import InvalidTask

_TENSOR = "__tensor__"
_STRUCTURE = "structure"
_DICTS: dict[str, type[dict[Any, Any]]] = {
    "pairs": dict,
    "counter": Counter,
    "ordered": OrderedDict,
}
_LISTS: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}


class UnsaveableValue(InvalidTask):
    """A value of a type that the file cannot hold; `path` is where it stands."""

    def __init__(self, path: str, value: object) -> None:
        kind = type(value).__name__
        super().__init__(
            f"training state: {path} is a {kind}, which cannot be saved",
            hint="keep numbers, texts, tensors, arrays, and lists and dicts of them",
        )
        self.path = path
        self.kind = kind


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Save nested dicts, lists, tuples and sets of tensors, arrays, numbers and texts."""
    tensors: dict[str, Tensor] = {}
    plain = _extract_tensors(dict(state), "carried", tensors)
    try:
        save_file(tensors, path, metadata={_STRUCTURE: json.dumps(plain)})
    except SafetensorError as problem:
        raise _system_error(problem, path) from problem


def load(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        plain = json.loads(file.metadata()[_STRUCTURE])
    state: dict[str, Any] = _insert_tensors(plain, tensors)
    return state


def _system_error(problem: SafetensorError, path: Path) -> Exception:
    """An OSError made of the library's text, so that the daemon recognizes a full disk."""
    number = re.search(r"os error (\d+)", str(problem))
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path)) if number else problem


def _extract_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The same structure with every tensor moved to `tensors` and replaced by its name there."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().clone().contiguous()
        return {_TENSOR: name}
    if isinstance(value, numpy.ndarray):
        try:
            return {"array": _extract_tensors(torch.from_numpy(value.copy()), name, tensors)}
        except TypeError:
            raise UnsaveableValue(name.removeprefix("carried."), value) from None
    if isinstance(value, numpy.bool_ | numpy.integer | numpy.floating):
        return {"numpy": [value.dtype.name, value.item()]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        kind = next((key for key, one in _DICTS.items() if type(value) is one), "pairs")
        # A list of pairs: in JSON, the optimizer's integer keys would become strings.
        pairs = [
            [_extract_tensors(k, f"{name}.key", {}), _extract_tensors(v, f"{name}.{k}", tensors)]
            for k, v in value.items()
        ]
        return {kind: pairs}
    if isinstance(value, list | tuple | set | frozenset):
        items = [_extract_tensors(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        kind = next((key for key, one in _LISTS.items() if isinstance(value, one)), "")
        return {kind: items} if kind else items
    if value is None or isinstance(value, str | int | float):
        return value
    raise UnsaveableValue(name.removeprefix("carried."), value)


def _insert_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_insert_tensors(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == _TENSOR:
        return tensors[content]
    if kind == "array":
        return _insert_tensors(content, tensors).numpy()
    if kind == "numpy":
        return numpy.dtype(content[0]).type(content[1])
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind in _LISTS:
        return _LISTS[kind](_insert_tensors(item, tensors) for item in content)
    pairs = {_insert_tensors(key, tensors): _insert_tensors(item, tensors) for key, item in content}
    return pairs if kind == "pairs" else _DICTS[kind](pairs)
