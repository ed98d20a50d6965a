"""Fuzz target: frames and pieces of a fetch, from a peer's bytes to the raw bytes of a chunk.

The first byte of an input selects the chunk, whether differences were requested, and how to read
the rest: as a frame, as a recipe for planes that are compressed first (random bytes are hardly ever
a zstd frame), or as a piece.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

import zstandard
from google.protobuf.message import DecodeError

from lightyear_node.storage.blobs import ChunkRefused, chunk_count, chunk_length
from lightyear_node.transport import messages
from lightyear_node.transport.codec import ChunkGrid, decode_chunk, encode_chunk
from lightyear_node.types import CHUNK_BYTES
from lightyear_node.v1 import exchange_pb2 as pb


def _header(*tensors: tuple[str, int]) -> bytes:
    widths, begin, entries = {"F64": 8, "F32": 4, "BF16": 2}, 0, {}
    for dtype, count in tensors:
        end = begin + widths[dtype] * count
        entries[dtype] = {"dtype": dtype, "shape": [count], "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


SMALL = ChunkGrid(_header(("F64", 3), ("F32", 40), ("BF16", 9)))
LONG = ChunkGrid(_header(("F32", CHUNK_BYTES // 4 + 16)))
# A small file, and the short last chunk of a longer one.
CHUNKS = ((SMALL, 0), (LONG, LONG.chunks - 1))
BASES = tuple(bytes(index % 251 for index in range(SMALL.raw_bytes)) for _ in CHUNKS)
PLANES_MAX = 16


def seeds() -> Iterator[bytes]:
    for which, (grid, index) in enumerate(CHUNKS):
        raw = bytes(grid.blank(index, bytearray(CHUNK_BYTES)))
        base = BASES[which][: len(raw)]
        yield bytes([which]) + encode_chunk(grid, index, raw)
        yield bytes([which | 2]) + encode_chunk(grid, index, raw, base)
        yield bytes([which | 4]) + b"\x00\x01\x28abc" * PLANES_MAX
    yield b"\x08" + messages.list_to(CHUNK_BYTES + 1, (b"\1" * 32, b"\2" * 32)).SerializeToString()
    yield b"\x08" + messages.chunk_to(0, b"frame").SerializeToString()


def check(wire: bytes) -> None:
    if not wire:
        return
    selector, rest = wire[0], wire[1:]
    try:
        if selector & 8:
            _piece(rest)
            return
        grid, index = CHUNKS[selector & 1]
        length = chunk_length(grid.raw_bytes, index)
        base = BASES[selector & 1][:length] if selector & 2 else None
        _chunk(grid, index, _packed(rest) if selector & 4 else rest, base)
    except (DecodeError, messages.Malformed, ChunkRefused):
        return


def _chunk(grid: ChunkGrid, index: int, frame: bytes, base: bytes | None) -> None:
    raw = decode_chunk(grid, index, frame, base)
    assert len(raw) == chunk_length(grid.raw_bytes, index)
    start = index * CHUNK_BYTES
    header = grid.header[start : start + CHUNK_BYTES]
    assert raw[: len(header)] == header, "the header must be our own"
    again = encode_chunk(grid, index, raw, base)
    assert decode_chunk(grid, index, again, base) == raw


def _piece(wire: bytes) -> None:
    piece = pb.Piece.FromString(wire)
    if piece.WhichOneof("piece") == "chunk":
        frame = messages.chunk_from(piece, 0)
        assert messages.chunk_from(messages.chunk_to(0, frame), 0) == frame
        return
    raw_bytes, chunk_digests = messages.list_from(piece)
    assert len(chunk_digests) == chunk_count(raw_bytes)
    assert messages.list_from(messages.list_to(raw_bytes, chunk_digests)) == (
        raw_bytes,
        chunk_digests,
    )


def _packed(recipe: bytes) -> bytes:
    """A frame from four bytes for each plane: method, length, content and damage."""
    parts = [recipe[:1]]
    for step in range(1, min(len(recipe), 4 * PLANES_MAX), 4):
        method, size, content, damage = recipe[step : step + 4].ljust(4, b"\0")
        plane = bytes([content]) * size
        if method & 1:
            plane = zstandard.compress(plane)
        if damage and plane:
            at = damage % len(plane)
            plane = plane[:at] + bytes([plane[at] ^ damage]) + plane[at + 1 :]
        parts += [struct.pack("<BI", method & 3, len(plane)), plane]
    return b"".join(parts)
