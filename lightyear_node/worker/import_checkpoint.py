"""Converts a checkpoint that an operator provides into a weights file of our layout.

Peers' updates are compared with our header and never parsed.  A checkpoint may have another layout,
so it is read with the safetensors library: the header only if it is no longer than our model's
could be, the tensors one at a time, and only those with the names, shapes and types of ours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightyear_node.learning import Layout, rounded, write
from lightyear_node.learning.weights import DTYPE_NAMES
from lightyear_node.storage import safetensors_header
from lightyear_node.types import Reason

HEADER_SPARE_BYTES = 64 << 10
"""Allowance for further names and metadata in a checkpoint's header."""


@dataclass(frozen=True, slots=True)
class CheckpointRefused:
    """`reason` is the one a peer's update would get; None if the file cannot be read at all."""

    reason: Reason | None
    about: str


def import_checkpoint(
    path: Path, out: Path, *, ours: Layout, wanted: Layout, also: Collection[str], bytes_max: int
) -> CheckpointRefused | None:
    """Write the checkpoint to `out` in the layout `wanted`.

    `ours` is the model's layout in full, `wanted` the same or that of updates.  `also` are
    further names that the checkpoint may contain: of tied tensors and of those not exchanged.
    """
    size = path.stat().st_size
    if size > bytes_max:
        return CheckpointRefused(
            Reason.TOO_LARGE, f"it has {size} bytes, our whole model {bytes_max}"
        )
    with path.open("rb") as file:
        length = safetensors_header.json_length(file.read(safetensors_header.LENGTH_BYTES))
    if length > 4 * len(ours.header) + HEADER_SPARE_BYTES:
        return CheckpointRefused(Reason.SCHEMA_MISMATCH, f"its header has {length} bytes")
    try:
        with safe_open(path, framework="pt") as file:
            problem = _difference(file, ours, wanted, also)
            if problem is not None:
                return CheckpointRefused(Reason.SCHEMA_MISMATCH, problem)
            # Rounded as a peer's update would be.
            tensors = _Tensors(file, ours)
            write(out, wanted, rounded(tensors, wanted, lambda count: None))
    except SafetensorError as problem:
        return CheckpointRefused(None, f"it is no safetensors file: {problem}"[:300])
    return None


def _difference(file: Any, ours: Layout, wanted: Layout, also: Collection[str]) -> str | None:
    names = set(file.keys())
    missing = sorted(ours.entries.keys() - names)
    if missing:
        return f"it has no tensor {missing[0]!r}"
    unknown = sorted(names - ours.entries.keys() - set(also))
    if unknown:
        return f"our model has no tensor {unknown[0][:80]!r}"
    for name, entry in ours.entries.items():
        found = file.get_slice(name)
        shape = tuple(found.get_shape())
        types = {DTYPE_NAMES[entry.dtype], DTYPE_NAMES[wanted.entries[name].dtype]}
        if shape != entry.shape or found.get_dtype() not in types:
            return f"{name} is {found.get_dtype()} {shape}, not {min(types)} {entry.shape}"
    return None


class _Tensors(dict[str, Tensor]):
    """Tensors read on access, in our own types."""

    def __init__(self, file: Any, ours: Layout) -> None:
        super().__init__()
        self._file, self._ours = file, ours

    def __missing__(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor.to(self._ours.entries[name].dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._ours.entries)
