"""Copies tensors as bytes from our own safetensors files into a new one.

Only for files whose digest was verified: untrusted headers are never read here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from typing import BinaryIO

from lightyear_node.storage import safetensors_header

COPY_BYTES = 1 << 20
_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2}


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """One tensor, and the position of its bytes in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: BufferedReader
    begin: int
    size: int

    @property
    def is_float(self) -> bool:
        return "F" in self.dtype

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def pieces(file: BufferedReader) -> list[TensorSlice]:
    """All tensors of a file, in the order of its header."""
    file.seek(0)
    header = safetensors_header.read(file)
    found = []
    for name, about in safetensors_header.parse(header).items():
        begin, end = about["data_offsets"]
        place = len(header) + begin
        found.append(
            TensorSlice(name, about["dtype"], tuple(about["shape"]), file, place, end - begin)
        )
    return found


def under(prefix: str, found: Sequence[TensorSlice]) -> list[TensorSlice]:
    """The tensors whose names start with `prefix`, with the prefix removed."""
    return [
        replace(piece, name=piece.name.removeprefix(prefix))
        for piece in found
        if piece.name.startswith(prefix)
    ]


def write(out: BinaryIO, tensors: Sequence[TensorSlice], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, wide types first, so that each tensor is aligned."""
    ordered = sorted(tensors, key=lambda piece: (-_SIZES.get(piece.dtype, 1), piece.name))
    entries = {}
    at = 0
    for piece in ordered:
        entries[piece.name] = safetensors_header.entry(
            piece.dtype, piece.shape, at, at + piece.size
        )
        at += piece.size
    out.write(safetensors_header.encode(entries, metadata))
    for piece in ordered:
        _copy(piece, out)


def _copy(piece: TensorSlice, out: BinaryIO) -> None:
    piece.file.seek(piece.begin)
    left = piece.size
    while left:
        read = piece.file.read(min(left, COPY_BYTES))
        if not read:
            raise EOFError(f"{piece.name} ends early")
        out.write(read)
        left -= len(read)
