"""What a site carries from one round to the next besides the exchanged weights.

The optimizer's state, the buffers that stay at home (integer counters, excluded tensors) and, under
some rules, a personal model are written beside every sealed update, so that a restarted site goes
on exactly where it was.  A plain safetensors file: tensors by name, all else as JSON in the header.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_TENSOR = "__tensor__"
_STRUCTURE = "structure"


def save(path: Path, carried: Mapping[str, Any]) -> None:
    """Nested dicts, lists and tuples of tensors and JSON values, such as an optimizer's state."""
    tensors: dict[str, Tensor] = {}
    plain = _pull_out(dict(carried), "carried", tensors)
    try:
        save_file(tensors, path, metadata={_STRUCTURE: json.dumps(plain)})
    except SafetensorError as problem:
        raise _system_error(problem, path) from problem


def load(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        plain = json.loads(file.metadata()[_STRUCTURE])
    carried: dict[str, Any] = _put_back(plain, tensors)
    return carried


def _system_error(problem: SafetensorError, path: Path) -> Exception:
    """The library tells a full disk only in words; the daemon must know it for what it is."""
    number = re.search(r"os error (\d+)", str(problem))
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path)) if number else problem


def _pull_out(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The same structure with every tensor replaced by the name it is filed under."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().clone().contiguous()
        return {_TENSOR: name}
    if isinstance(value, dict):
        # A list of pairs: JSON would turn the optimizer's integer keys into text.
        return {"pairs": [[k, _pull_out(v, f"{name}.{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        items = [_pull_out(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    return value


def _put_back(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if _TENSOR in value:
            return tensors[value[_TENSOR]]
        if "tuple" in value:
            return tuple(_put_back(item, tensors) for item in value["tuple"])
        return {key: _put_back(item, tensors) for key, item in value["pairs"]}
    if isinstance(value, list):
        return [_put_back(item, tensors) for item in value]
    return value
