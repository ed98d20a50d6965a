"""Weights as files: which tensors cross the wire, in which bytes, and back.

A weights file is a canonical safetensors file.  The same tensors give the same bytes at every site,
so the header can be compared instead of parsed, and a digest of the file names the model:

    u64 little-endian   length N of the header
    N bytes             compact JSON, no `__metadata__`, padded with spaces to a multiple of 8
    the tensors         sorted by (-itemsize, name), contiguous, hence each one aligned

This is the only module of `learning` that touches a disk.  It does not know who wrote a file.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from torch import Tensor, nn

from lightyear_node.records import Digest

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


class SchemaMismatch(ValueError):
    """A file, or a set of tensors, that is not laid out as our own model is."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies; offsets count from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Names, shapes and types of a model's exchanged tensors, and their place in a file."""

    header: bytes
    """The first 8 + N bytes of every file of this layout."""
    entries: Mapping[str, Entry] = field(compare=False, hash=False)
    """In the order of the file."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        for name, tensor in tensors.items():
            if name == "__metadata__":
                raise ValueError("safetensors reserves the name __metadata__; rename the tensor")
            if tensor.dtype not in _DTYPE_NAMES:
                raise ValueError(
                    f"{name} is {tensor.dtype}, which cannot be exchanged; exclude it or convert it"
                )
        order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        spans: dict[str, tuple[int, int]] = {}
        at = 0
        for name in order:
            end = at + tensors[name].numel() * tensors[name].element_size()
            spans[name] = (at, end)
            at = end
        text = json.dumps(
            {
                name: {
                    "dtype": _DTYPE_NAMES[tensors[name].dtype],
                    "shape": list(tensors[name].shape),
                    "data_offsets": list(spans[name]),
                }
                for name in order
            },
            separators=(",", ":"),
        ).encode("ascii")
        text += b" " * (-len(text) % 8)
        header = struct.pack("<Q", len(text)) + text
        entries = {
            name: Entry(
                tensors[name].dtype,
                tuple(tensors[name].shape),
                len(header) + spans[name][0],
                len(header) + spans[name][1],
            )
            for name in order
        }
        return cls(header, entries)

    @property
    def file_bytes(self) -> int:
        return max((entry.end for entry in self.entries.values()), default=len(self.header))

    @property
    def schema(self) -> Digest:
        """What two sites compare to know that their models fit."""
        return Digest(hashlib.sha256(self.header).hexdigest())

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise `SchemaMismatch` unless the tensors have our names, shapes and types."""
        if isinstance(tensors, Weights) and tensors.layout == self:
            return
        if tensors.keys() != self.entries.keys():
            stray = sorted(tensors.keys() ^ self.entries.keys())
            raise SchemaMismatch(f"tensor {stray[0]!r} is on one side only")
        for name, entry in self.entries.items():
            _check_entry(name, tensors[name], entry)


def _check_entry(name: str, tensor: Tensor, entry: Entry) -> None:
    if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
        raise SchemaMismatch(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {entry.dtype} {entry.shape}"
        )


def exchanged(module: nn.Module, exclude: Sequence[str] = ()) -> dict[str, Tensor]:
    """The tensors that cross the wire: floating entries of the state dict, less the excluded ones.

    `exclude` holds shell patterns, as in `*.running_*`.  Integer buffers (`num_batches_tracked`)
    stay local.  The tensors share memory with the module.
    """
    chosen: dict[str, Tensor] = {}
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor) or any(fnmatchcase(name, glob) for glob in exclude):
            continue
        if value.is_complex():
            raise ValueError(f"{name} is complex, which cannot be exchanged; exclude it")
        if value.is_floating_point():
            chosen[name] = value.detach()
    if not chosen:
        raise ValueError("no tensor is left to exchange; check the exclude patterns")
    return chosen


def header_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """The first 8 + N bytes of the file these tensors make; values are not looked at."""
    return Layout.of(tensors).header


def write(
    path: str | os.PathLike[str],
    layout: Layout,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
) -> None:
    """Write one tensor at a time, so that a stream of pairs never needs a whole second model.

    Pairs must come in the layout's order.  The file appears under its name only when it is whole;
    making it durable is the store's task.
    """
    target = Path(path)
    if isinstance(tensors, Mapping):
        layout.check(tensors)
        pairs: Iterable[tuple[str, Tensor]] = ((name, tensors[name]) for name in layout.entries)
    else:
        pairs = tensors
    part = target.with_name(target.name + ".part")
    try:
        with part.open("wb", buffering=0) as file:
            _write_all(file, layout.header)
            _write_pairs(file, layout, pairs)
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _write_pairs(file: BinaryIO, layout: Layout, pairs: Iterable[tuple[str, Tensor]]) -> None:
    expected = iter(layout.entries.items())
    for name, tensor in pairs:
        wanted, entry = next(expected, (None, None))
        if name != wanted or entry is None:
            raise SchemaMismatch(f"{name!r} came where the layout has {wanted!r}")
        _check_entry(name, tensor, entry)
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        _write_all(file, flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    left = next(expected, None)
    if left is not None:
        raise SchemaMismatch(f"the tensors ended before {left[0]!r}")


def _write_all(file: BinaryIO, content: bytes | memoryview) -> None:
    rest = memoryview(content)
    while rest:  # a raw write may be short: Linux stops at 2 GiB
        rest = rest[file.write(rest) :]


class Weights(Mapping[str, Tensor]):
    """A weights file, mapped into memory: tensors are views, read from disk when touched.

    The header is compared with ours byte for byte and never parsed.  A view may be used after the
    `with` block.  Views are for reading: what is written to one never reaches the file.
    """

    def __init__(self, path: str | os.PathLike[str], layout: Layout) -> None:
        self.layout = layout
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != layout.file_bytes:
                raise SchemaMismatch(f"{path} has {size} bytes, not {layout.file_bytes}")
            # A private mapping: torch asks for a writable buffer, and the file stays as it is.
            self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if self._map[: len(layout.header)] != layout.header:
            self._map = None
            raise SchemaMismatch(f"{path} does not begin with this model's header")

    def __getitem__(self, name: str) -> Tensor:
        entry = self.layout.entries[name]
        if self._map is None:
            raise ValueError("the weights file is closed")
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=entry.dtype)
        count = math.prod(entry.shape)
        flat = torch.frombuffer(self._map, dtype=entry.dtype, count=count, offset=entry.begin)
        return flat.reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.entries)

    def __len__(self) -> int:
        return len(self.layout.entries)

    def forget(self, name: str | None = None) -> None:
        """Give a tensor's pages, or all, back; the file is read again if they are needed again."""
        if self._map is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        begin, end = 0, len(self._map)
        if name is not None:
            entry = self.layout.entries[name]
            # Whole pages only: those at the ends are shared with a neighbour that may be in use.
            begin = -(-entry.begin // mmap.PAGESIZE) * mmap.PAGESIZE
            end = entry.end // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def close(self) -> None:
        # Unmapping under a living view would crash the process, so the last view does it.
        self._map = None

    def __enter__(self) -> Weights:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    return tensors.layout if isinstance(tensors, Weights) else Layout.of(tensors)


def let_go(tensors: Mapping[str, Tensor], name: str | None = None) -> None:
    """Say that a tensor, or all, will not be needed soon: of a file, only what is used is held."""
    if isinstance(tensors, Weights):
        tensors.forget(name)


def load_into(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Replace the module's exchanged tensors; everything else keeps its local value."""
    local = module.state_dict()
    for name, tensor in weights.items():
        if name not in local or local[name].shape != tensor.shape:
            raise SchemaMismatch(f"{name} {tuple(tensor.shape)} does not fit the module")
    module.load_state_dict(dict(weights), strict=False)
    let_go(weights)
