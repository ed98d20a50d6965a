"""Writes and reads weights files.

A weights file is a canonical safetensors file.  The same tensors give the same bytes at every site,
so the header is compared instead of parsed, and the digest of the file identifies the model:

    u64 little-endian   length N of the header
    N bytes             compact JSON, no `__metadata__`, padded with spaces to a multiple of 8
    the tensors         sorted by (-itemsize, name), contiguous, hence each one aligned

A model has two layouts: its own, and that of its updates on the wire, where long element types may
be rounded to a shorter one.  `Weights` reads files of both with the model's own types.

This is the only module of `learning` that accesses the disk.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from torch import Tensor, nn

from lightyear_node.errors import InvalidTask, LightyearError
from lightyear_node.learning.wrappers import without_wrappers
from lightyear_node.storage import safetensors_header
from lightyear_node.storage.atomic_files import staged
from lightyear_node.types import Digest

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
LOAD_BYTES_MAX = 64 << 20
"""Size of the pieces in which tensors are loaded into a module."""


class SchemaMismatch(LightyearError, ValueError):
    """A file or a set of tensors has another layout than our model."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Type, shape and position of a tensor; offsets in bytes from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Names, shapes and types of a model's exchanged tensors, and their positions in a file."""

    header: bytes
    """The first 8 + N bytes of every file of this layout."""
    entries: Mapping[str, TensorEntry] = field(compare=False, hash=False)
    """In the order of the file."""
    tied: Mapping[str, str] = field(default_factory=dict, compare=False, hash=False)
    """Further name → exchanged name, of tied tensors."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], tied: Mapping[str, str] | None = None) -> Layout:
        for name, tensor in tensors.items():
            if name == safetensors_header.METADATA:
                raise InvalidTask("safetensors reserves the name __metadata__; rename the tensor")
            if tensor.dtype not in DTYPE_NAMES:
                raise InvalidTask(
                    f"{name} is {tensor.dtype}, which cannot be exchanged; exclude it or convert it"
                )
        kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        return cls._placed(kinds, tied or {})

    @classmethod
    def _placed(
        cls, kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], tied: Mapping[str, str]
    ) -> Layout:
        """Assign a position in the file to each tensor, given its type and shape."""
        order = sorted(kinds, key=lambda name: (-kinds[name][0].itemsize, name))
        spans: dict[str, tuple[int, int]] = {}
        at = 0
        for name in order:
            dtype, shape = kinds[name]
            end = at + math.prod(shape) * dtype.itemsize
            spans[name] = (at, end)
            at = end
        header = safetensors_header.encode(
            {
                name: safetensors_header.entry(
                    DTYPE_NAMES[kinds[name][0]], kinds[name][1], *spans[name]
                )
                for name in order
            }
        )
        entries = {
            name: TensorEntry(
                *kinds[name], len(header) + spans[name][0], len(header) + spans[name][1]
            )
            for name in order
        }
        return cls(header, entries, tied)

    def shortened(self, dtype: torch.dtype) -> Layout:
        """The same tensors, with types longer than `dtype` replaced by it."""
        kinds = {
            name: (dtype if entry.dtype.itemsize > dtype.itemsize else entry.dtype, entry.shape)
            for name, entry in self.entries.items()
        }
        return self._placed(kinds, self.tied)

    @property
    def file_bytes(self) -> int:
        return max((entry.end for entry in self.entries.values()), default=len(self.header))

    @property
    def schema(self) -> Digest:
        """Two sites compare it to check that their models have the same layout."""
        return Digest(hashlib.sha256(self.header).hexdigest())

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise `SchemaMismatch` unless the tensors have our names, shapes and types."""
        if isinstance(tensors, Weights) and tensors.layout == self:
            return
        if tensors.keys() != self.entries.keys():
            unmatched = sorted(tensors.keys() ^ self.entries.keys())
            raise SchemaMismatch(f"tensor {unmatched[0]!r} is on one side only")
        for name, entry in self.entries.items():
            _check_entry(name, tensors[name], entry)


def _check_entry(name: str, tensor: Tensor, entry: TensorEntry) -> None:
    if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
        raise SchemaMismatch(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {entry.dtype} {entry.shape}"
        )


def header_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """The first 8 + N bytes of a file of these tensors; depends on no value."""
    return Layout.of(tensors).header


def write(
    path: str | os.PathLike[str],
    layout: Layout,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
) -> None:
    """Write a file, one tensor at a time; an iterator of pairs needs no second model in memory.

    Pairs must be in the layout's order.  The file appears under its name only when it is complete;
    the store makes it durable.
    """
    target = Path(path)
    if isinstance(tensors, Mapping):
        layout.check(tensors)
        pairs: Iterable[tuple[str, Tensor]] = ((name, tensors[name]) for name in layout.entries)
    else:
        pairs = tensors
    with staged(target) as [part], part.open("wb", buffering=0) as file:
        _write_all(file, layout.header)
        _write_pairs(file, layout, pairs)


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


def rounded(
    tensors: Mapping[str, Tensor], layout: Layout, on_clamped: Callable[[int], None]
) -> Iterator[tuple[str, Tensor]]:
    """Convert the tensors to the types of this layout, in its order, one at a time.

    An entry too large for the shorter type becomes the largest number of that type, so that one
    entry does not make the whole update invalid; `on_clamped` is called with their number.  Entries
    that are not finite stay so.
    """
    for name, entry in layout.entries.items():
        # On the CPU, so that rounding does not depend on the device.
        exact = tensors[name].detach().to("cpu")
        if exact.dtype == entry.dtype:
            yield name, exact
            continue
        short = exact.to(entry.dtype)
        clamped = short.isinf() & exact.isfinite()
        if clamped.any():
            on_clamped(int(clamped.sum()))
            largest = torch.finfo(entry.dtype).max
            short = torch.where(clamped, exact.sign().to(entry.dtype) * largest, short)
        yield name, short


class Weights(Mapping[str, Tensor]):
    """A weights file, mapped into memory: tensors are views, read from disk on access.

    The header is compared with ours byte for byte and never parsed.  A view may be used after the
    `with` block.  Views are for reading: writing to one never changes the file.

    A received file may have the layout `wire`: the tensors of `layout` in shorter types.  Each
    access then returns a converted copy.
    """

    def __init__(
        self, path: str | os.PathLike[str], layout: Layout, wire: Layout | None = None
    ) -> None:
        self.layout = layout
        self._in_file = wire or layout
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != self._in_file.file_bytes:
                raise SchemaMismatch(f"{path} has {size} bytes, not {self._in_file.file_bytes}")
            # A private mapping: torch requires a writable buffer, and the file must not change.
            self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        header = self._in_file.header
        if self._map[: len(header)] != header:
            self._map = None
            raise SchemaMismatch(f"{path} does not begin with this model's header")

    def __getitem__(self, name: str) -> Tensor:
        entry, dtype = self._in_file.entries[name], self.layout.entries[name].dtype
        if self._map is None:
            raise ValueError("the weights file is closed")
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=dtype)
        count = math.prod(entry.shape)
        flat = torch.frombuffer(self._map, dtype=entry.dtype, count=count, offset=entry.begin)
        return flat.reshape(entry.shape).to(dtype)

    def __contains__(self, name: object) -> bool:
        return name in self.layout.entries  # `Mapping` would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.entries)

    def __len__(self) -> int:
        return len(self.layout.entries)

    def release(self, name: str | None = None) -> None:
        """Release the pages of a tensor, or all; they are read again when needed."""
        if self._map is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        begin, end = 0, len(self._map)
        if name is not None:
            entry = self._in_file.entries[name]
            # Whole pages only: those at the ends hold other tensors too, which may be in use.
            begin = -(-entry.begin // mmap.PAGESIZE) * mmap.PAGESIZE
            end = entry.end // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def close(self) -> None:
        # Unmapping would crash a process that uses a view, so the last view does it.
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


def other_names(tensors: Mapping[str, Tensor]) -> Mapping[str, str]:
    """Further names of tied tensors → their names here; empty unless read from a weights file."""
    return tensors.layout.tied if isinstance(tensors, Weights) else {}


def release(tensors: Mapping[str, Tensor], name: str | None = None) -> None:
    """Release the memory of a tensor, or of all, if they are read from a weights file."""
    if isinstance(tensors, Weights):
        tensors.release(name)


def load_into(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Replace the module's exchanged tensors; all others keep their values.

    In pieces, so that a file with tensors to convert is never in memory as a whole.
    """
    module = without_wrappers(module)
    local = {name: value.shape for name, value in module.state_dict().items() if name in weights}
    for name, shape in _shapes(weights):
        if local.get(name) != shape:
            raise SchemaMismatch(f"{name} {tuple(shape)} does not fit the module")
    piece: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights.items():
        piece[name] = tensor
        size += tensor.nbytes
        if size >= LOAD_BYTES_MAX:
            module.load_state_dict(piece, strict=False)
            piece, size = {}, 0
            release(weights)
    module.load_state_dict(piece, strict=False)
    release(weights)


def _shapes(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, without reading the tensors of a file."""
    if isinstance(weights, Weights):
        yield from ((name, entry.shape) for name, entry in weights.layout.entries.items())
    else:
        yield from ((name, tuple(tensor.shape)) for name, tensor in weights.items())
