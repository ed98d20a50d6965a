"""A checkpoint from anywhere, made into a file that the judge can read; or why it cannot be.

Peers' updates are compared with our header and never parsed.  What a person brings may be laid out
otherwise, so it is read with the safetensors library: its header only if it is not longer than our
model's could be, its tensors one at a time, and nothing that is not ours by name, shape and type.
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
from lightyear_node.records import Reason

HEADER_SPARE_BYTES = 64 << 10
"""For names and notes that a checkpoint has besides ours."""


@dataclass(frozen=True, slots=True)
class Refused:
    """`reason` is the node's own word for it; None where the file cannot be read at all."""

    reason: Reason | None
    about: str


def take_in(
    path: Path, out: Path, *, ours: Layout, wanted: Layout, also: Collection[str], bytes_max: int
) -> Refused | None:
    """Write the checkpoint to `out` as the layout `wanted` has it.

    `ours` is the model in full, `wanted` the same or as it travels; `also` are further tensors that
    it may have in it: those that stay at home, and second names.
    """
    size = path.stat().st_size
    if size > bytes_max:
        return Refused(Reason.TOO_LARGE, f"it has {size} bytes, our whole model {bytes_max}")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > 4 * len(ours.header) + HEADER_SPARE_BYTES:
        return Refused(Reason.SCHEMA_MISMATCH, f"its header has {length} bytes")
    try:
        with safe_open(path, framework="pt") as file:
            problem = _difference(file, ours, wanted, also)
            if problem is not None:
                return Refused(Reason.SCHEMA_MISMATCH, problem)
            # As a peer's copy would have come here.
            tensors = _Tensors(file, ours)
            write(out, wanted, rounded(tensors, wanted, lambda count: None))
    except SafetensorError as problem:
        return Refused(None, f"it is no safetensors file: {problem}"[:300])
    return None


def _difference(file: Any, ours: Layout, wanted: Layout, also: Collection[str]) -> str | None:
    names = set(file.keys())
    missing = sorted(ours.entries.keys() - names)
    if missing:
        return f"it has no tensor {missing[0]!r}"
    strange = sorted(names - ours.entries.keys() - set(also))
    if strange:
        return f"our model has no tensor {strange[0][:80]!r}"
    for name, entry in ours.entries.items():
        found = file.get_slice(name)
        shape = tuple(found.get_shape())
        types = {DTYPE_NAMES[entry.dtype], DTYPE_NAMES[wanted.entries[name].dtype]}
        if shape != entry.shape or found.get_dtype() not in types:
            return f"{name} is {found.get_dtype()} {shape}, not {min(types)} {entry.shape}"
    return None


class _Tensors(dict[str, Tensor]):
    """Read when asked for, in our own types."""

    def __init__(self, file: Any, ours: Layout) -> None:
        super().__init__()
        self._file, self._ours = file, ours

    def __missing__(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor.to(self._ours.entries[name].dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._ours.entries)
