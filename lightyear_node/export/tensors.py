"""Tensors as bytes: picked from our own safetensors files, and put together into a new one.

Only for files whose digest has been checked: a header of somebody else's is never read here.  No
value is looked at, so each tensor's bytes are what they were.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from typing import BinaryIO

COPY_BYTES = 1 << 20
_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2}


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor, and where its bytes lie."""

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

    def called(self, name: str) -> Piece:
        return replace(self, name=name)


def pieces(file: BufferedReader) -> list[Piece]:
    """All tensors of a file, in its order."""
    file.seek(0)
    (length,) = struct.unpack("<Q", file.read(8))
    header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    found = []
    for name, about in header.items():
        begin, end = about["data_offsets"]
        place = 8 + length + begin
        found.append(Piece(name, about["dtype"], tuple(about["shape"]), file, place, end - begin))
    return found


def under(prefix: str, found: Sequence[Piece]) -> list[Piece]:
    """Those whose names begin so, by the rest of their names."""
    return [
        piece.called(piece.name.removeprefix(prefix))
        for piece in found
        if piece.name.startswith(prefix)
    ]


def write(out: BinaryIO, tensors: Sequence[Piece], metadata: Mapping[str, str]) -> None:
    """A safetensors file; wide types first, so that each tensor is aligned."""
    ordered = sorted(tensors, key=lambda piece: (-_SIZES.get(piece.dtype, 1), piece.name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for piece in ordered:
        header[piece.name] = {
            "dtype": piece.dtype,
            "shape": list(piece.shape),
            "data_offsets": [at, at + piece.size],
        }
        at += piece.size
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    out.write(struct.pack("<Q", len(text)) + text)
    for piece in ordered:
        _copy(piece, out)


def _copy(piece: Piece, out: BinaryIO) -> None:
    piece.file.seek(piece.begin)
    left = piece.size
    while left:
        read = piece.file.read(min(left, COPY_BYTES))
        if not read:
            raise EOFError(f"{piece.name} ends early")
        out.write(read)
        left -= len(read)
