"""Weights as files: tensors to bytes, and back.

A weights file is a canonical safetensors file.  The same tensors give the same bytes at every site,
so the header can be compared instead of parsed, and a digest of the file names the model:

    u64 little-endian   length N of the header
    N bytes             compact JSON, no `__metadata__`, padded with spaces to a multiple of 8
    the tensors         sorted by (-itemsize, name), contiguous, hence each one aligned

A model has two layouts: its own, and the one its updates have on the wire, where long types may be
rounded to a shorter one.  A file of the second is read as if it were one of the first.

This is the only module of `learning` that touches a disk.  It does not know who wrote a file.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from torch import Tensor, nn

from lightyear_node.records import Digest

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
LOAD_BYTES_MAX = 64 << 20
"""Tensors that are read, and perhaps converted, before they are given to a module together."""


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
    tied: Mapping[str, str] = field(default_factory=dict, compare=False, hash=False)
    """Further names that the model has for some of its tensors, and under which they travel."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], tied: Mapping[str, str] | None = None) -> Layout:
        for name, tensor in tensors.items():
            if name == "__metadata__":
                raise ValueError("safetensors reserves the name __metadata__; rename the tensor")
            if tensor.dtype not in DTYPE_NAMES:
                raise ValueError(
                    f"{name} is {tensor.dtype}, which cannot be exchanged; exclude it or convert it"
                )
        kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        return cls._placed(kinds, tied or {})

    @classmethod
    def _placed(
        cls, kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], tied: Mapping[str, str]
    ) -> Layout:
        """Type and shape of each tensor, put into the order of a file."""
        order = sorted(kinds, key=lambda name: (-kinds[name][0].itemsize, name))
        spans: dict[str, tuple[int, int]] = {}
        at = 0
        for name in order:
            dtype, shape = kinds[name]
            end = at + math.prod(shape) * dtype.itemsize
            spans[name] = (at, end)
            at = end
        text = json.dumps(
            {
                name: {
                    "dtype": DTYPE_NAMES[kinds[name][0]],
                    "shape": list(kinds[name][1]),
                    "data_offsets": list(spans[name]),
                }
                for name in order
            },
            separators=(",", ":"),
        ).encode("ascii")
        text += b" " * (-len(text) % 8)
        header = struct.pack("<Q", len(text)) + text
        entries = {
            name: Entry(*kinds[name], len(header) + spans[name][0], len(header) + spans[name][1])
            for name in order
        }
        return cls(header, entries, tied)

    def shortened(self, dtype: torch.dtype) -> Layout:
        """The same tensors where types longer than this one are rounded to it."""
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


def rounded(
    tensors: Mapping[str, Tensor], layout: Layout, on_clamped: Callable[[int], None]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors as this layout has them, in its order and one at a time, to be written.

    What is too large for the shorter type becomes the largest number it has, since one entry must
    not cost a site its round; `on_clamped` gets how many there were.  What was not finite before
    stays so, for the peers to see.
    """
    for name, entry in layout.entries.items():
        # On the CPU, so that every device rounds alike.
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
    """A weights file, mapped into memory: tensors are views, read from disk when touched.

    The header is compared with ours byte for byte and never parsed.  A view may be used after the
    `with` block.  Views are for reading: what is written to one never reaches the file.

    A file that came over the wire may have the layout `wire`: its tensors are those of `layout` in
    shorter types, and each becomes a tensor of our own type, a copy, whenever it is asked for.
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
            # A private mapping: torch asks for a writable buffer, and the file stays as it is.
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
        return name in self.layout.entries  # `Mapping` would read the tensor to find out

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
            entry = self._in_file.entries[name]
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


def tied_in(tensors: Mapping[str, Tensor]) -> Mapping[str, str]:
    """Further names of these tensors, where a weights file's layout knows of any."""
    return tensors.layout.tied if isinstance(tensors, Weights) else {}


def let_go(tensors: Mapping[str, Tensor], name: str | None = None) -> None:
    """Say that a tensor, or all, will not be needed soon: of a file, only what is used is held."""
    if isinstance(tensors, Weights):
        tensors.forget(name)


def load_into(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Replace the module's exchanged tensors; everything else keeps its local value.

    In pieces, so that a file whose tensors must be converted never is in memory as a whole.
    """
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
            let_go(weights)
    module.load_state_dict(piece, strict=False)
    let_go(weights)


def _shapes(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Without reading, let alone converting, a file's tensors."""
    if isinstance(weights, Weights):
        yield from ((name, entry.shape) for name, entry in weights.layout.entries.items())
    else:
        yield from ((name, tuple(tensor.shape)) for name, tensor in weights.items())
