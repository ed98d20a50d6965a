"""Lossless wire format of one chunk of weights.

Owns the frame's layout.  Must not know files or peers.  Weights hardly compress as stored: the
lower bytes of a float are noise and hide the regularity of the higher ones.  So the bytes of all
elements are split into planes, lowest bytes first, and each plane is compressed separately, or
stored if that gains nothing.  In a delta, elements are first replaced by their difference to the
same chunk of the base (the sender's previous update), as integers with the sign in the lowest bit:
small steps leave the upper planes almost empty.

    u8    0: values; 1: differences to the same chunk of the base
    then, for each run of elements of equal width, for each plane:
    u8    0: stored; 1: one zstd frame that states its content size
    u32   little-endian, length of the plane as sent
    …     the plane

The file's header is never sent: the receiver inserts its own.  All sizes in a frame are checked
before memory is allocated: zstandard ignores `max_output_size` if a frame states its size, and
32 kB can state a gigabyte.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import zstandard

from lightyear_node.storage import safetensors_header
from lightyear_node.storage.blobs import ChunkRefused, chunk_count, chunk_length
from lightyear_node.transport.limits import FRAME_BYTES_MAX
from lightyear_node.types import CHUNK_BYTES, Reason

_PACKING = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=20,
    hash_log=8,
    min_match=7,
    target_length=0,
    write_content_size=1,
    write_checksum=0,
    write_dict_id=0,
)
"""Like zstd's level 1, with almost no match search: a plane has no repetitions except runs of one
byte, and accidental matches make the Huffman code worse.  Twice as fast, and slightly smaller."""
GAIN_MIN = 0.02
"""A plane that shrinks by less is stored, which needs no work at the receiver."""
DELTA_GOOD_ENOUGH = 0.75
"""Differences smaller than this share of the raw bytes are sent without encoding the values."""

_VALUES, _DIFFERENCES = 0, 1
_STORED, _ZSTD = 0, 1
_HEAD = struct.Struct("<BI")
_MAGIC = zstandard.FRAME_HEADER
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}

Bytes: TypeAlias = bytes | bytearray | memoryview
Elements: TypeAlias = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class ElementRun:
    """Adjacent elements of one width, at bytes `begin` to `end`."""

    begin: int
    end: int
    width: int


class ChunkGrid:
    """Positions of the elements in a weights file of our model, the same for all its updates."""

    def __init__(self, header: bytes) -> None:
        """`header` is that of our own file: the length in 8 bytes, then safetensors' JSON."""
        self.header = header
        entries = safetensors_header.parse(header)
        runs: list[ElementRun] = []
        for entry in sorted(entries.values(), key=lambda entry: entry["data_offsets"]):
            begin, end = (len(header) + offset for offset in entry["data_offsets"])
            width = _WIDTHS[entry["dtype"]]
            if runs and runs[-1].width == width and runs[-1].end == begin:
                runs[-1] = ElementRun(runs[-1].begin, end, width)
            elif begin < end:
                runs.append(ElementRun(begin, end, width))
        if any(run.begin % run.width for run in runs):
            raise ValueError("an element would cross the border between two chunks")
        self._runs = runs
        self.raw_bytes = runs[-1].end if runs else len(header)
        self.chunks = chunk_count(self.raw_bytes)

    def runs(self, index: int) -> Iterator[ElementRun]:
        """The runs in chunk `index`, at offsets relative to its start."""
        start = index * CHUNK_BYTES
        stop = start + CHUNK_BYTES
        for run in self._runs:
            if run.begin < stop and run.end > start:
                yield ElementRun(
                    max(run.begin, start) - start, min(run.end, stop) - start, run.width
                )

    def blank(self, index: int, buffer: bytearray) -> memoryview:
        """Chunk `index` with our own header in its place; the rest is undefined."""
        start = index * CHUNK_BYTES
        header = self.header[start : start + CHUNK_BYTES]
        chunk = memoryview(buffer)[: chunk_length(self.raw_bytes, index)]
        chunk[: len(header)] = header
        return chunk


def encode_chunk(grid: ChunkGrid, index: int, raw: Bytes, base: Bytes | None = None) -> bytes:
    """Encode a chunk as values or, with a base, as differences, whichever is shorter."""
    if base is None:
        return _encode(grid, index, raw, None)
    differences = _encode(grid, index, raw, base)
    if len(differences) < DELTA_GOOD_ENOUGH * len(raw):
        return differences
    return min(differences, _encode(grid, index, raw, None), key=len)


def needs_base(frame: Bytes) -> bool:
    """Whether a frame has differences."""
    return len(frame) > 0 and frame[0] == _DIFFERENCES


def decode_chunk(
    grid: ChunkGrid,
    index: int,
    frame: Bytes,
    base: Bytes | None = None,
    buffer: bytearray | None = None,
) -> memoryview:
    """The chunk's raw bytes; pass `base` only if differences were requested.

    The result is in `buffer`, of CHUNK_BYTES, if that is given: allocating memory for every chunk
    would take as long as decoding.
    """
    if len(frame) > FRAME_BYTES_MAX:
        raise ChunkRefused(Reason.TOO_LARGE, f"a frame of {len(frame)} bytes")
    rest = memoryview(frame)
    kind = rest[0] if rest else None
    if kind not in (_VALUES, _DIFFERENCES):
        raise ChunkRefused(Reason.MALFORMED, "a frame of unknown kind")
    if kind == _DIFFERENCES and base is None:
        raise ChunkRefused(Reason.MALFORMED, "differences that were not requested")
    rest = rest[1:]
    raw = grid.blank(index, bytearray(CHUNK_BYTES) if buffer is None else buffer)
    for run in grid.runs(index):
        count = (run.end - run.begin) // run.width
        planes: list[Bytes] = []
        for _ in range(run.width):
            plane, rest = _plane(rest, count)
            planes.append(plane)
        elements = _view(raw, run)
        _join(planes, elements)
        if kind == _DIFFERENCES and base is not None:
            _add(_view(base, run), elements)
    if rest:
        raise ChunkRefused(Reason.MALFORMED, f"{len(rest)} bytes follow the last plane")
    return raw


def _encode(grid: ChunkGrid, index: int, raw: Bytes, base: Bytes | None) -> bytes:
    # A new one for every chunk, since it cannot be shared between threads; it is cheap.
    encoder = zstandard.ZstdCompressor(compression_params=_PACKING)
    parts = [bytes([_VALUES if base is None else _DIFFERENCES])]
    for run in grid.runs(index):
        elements = _view(raw, run)
        if base is not None:
            elements = _differences(elements, _view(base, run))
        for byte in range(run.width):
            plane = (elements >> elements.dtype.type(8 * byte)).astype(np.uint8).data
            packed = encoder.compress(plane)
            if len(packed) <= (1 - GAIN_MIN) * len(plane):
                parts += [_HEAD.pack(_ZSTD, len(packed)), packed]
            else:
                parts += [_HEAD.pack(_STORED, len(plane)), plane]
    return b"".join(parts)


def _view(chunk: Bytes, run: ElementRun) -> Elements:
    count = (run.end - run.begin) // run.width
    return np.frombuffer(chunk, dtype=f"<u{run.width}", count=count, offset=run.begin)


def _differences(elements: Elements, base: Elements) -> Elements:
    """Zigzag-encoded differences, modulo the elements' width; the sign becomes bit 0."""
    signed = (elements - base).view(f"<i{elements.itemsize}")
    sign = signed >> (8 * elements.itemsize - 1)
    signed <<= 1
    signed ^= sign
    folded: Elements = signed.view(elements.dtype)
    return folded


def _add(base: Elements, folded: Elements) -> None:
    """The inverse of `_differences`, in place: copies would be too slow."""
    one = folded.dtype.type(1)
    sign = folded & one
    np.negative(sign, out=sign)
    folded >>= one
    folded ^= sign
    folded += base


def _join(planes: list[Bytes], elements: Elements) -> None:
    """Assemble elements from their planes, from the highest byte to the lowest."""
    count = len(elements)
    elements[:] = np.frombuffer(planes[-1], np.uint8, count)
    for plane in reversed(planes[:-1]):
        elements <<= elements.dtype.type(8)
        elements |= np.frombuffer(plane, np.uint8, count)


def _plane(rest: memoryview, count: int) -> tuple[Bytes, memoryview]:
    """The next plane, of exactly `count` bytes, and the rest of the frame."""
    if len(rest) < _HEAD.size:
        raise ChunkRefused(Reason.MALFORMED, "the frame ends before its last plane")
    method, length = _HEAD.unpack_from(rest)
    packed, rest = rest[_HEAD.size : _HEAD.size + length], rest[_HEAD.size + length :]
    if len(packed) != length:
        raise ChunkRefused(Reason.MALFORMED, "the frame ends within a plane")
    if method == _STORED:
        if length != count:
            raise ChunkRefused(Reason.MALFORMED, f"a plane of {length} bytes, not {count}")
        return packed, rest
    if method != _ZSTD:
        raise ChunkRefused(Reason.MALFORMED, f"a plane of unknown compression {method}")
    return _unpacked(bytes(packed), count), rest


def _unpacked(packed: bytes, count: int) -> bytes:
    if not packed.startswith(_MAGIC):
        # This excludes skippable frames, too.
        raise ChunkRefused(Reason.MALFORMED, "not a zstd frame")
    try:
        header = zstandard.get_frame_parameters(packed)
    except zstandard.ZstdError as error:
        raise ChunkRefused(Reason.MALFORMED, f"unreadable frame header: {error}") from None
    if header.content_size != count:
        larger = header.content_size > count
        raise ChunkRefused(
            Reason.TOO_LARGE if larger else Reason.MALFORMED,
            f"the frame states {header.content_size} bytes, the plane has {count}",
        )
    if header.window_size > CHUNK_BYTES:
        raise ChunkRefused(Reason.TOO_LARGE, f"a window of {header.window_size} bytes")
    if header.dict_id != 0:
        raise ChunkRefused(Reason.MALFORMED, "the frame needs a dictionary")
    decoder = zstandard.ZstdDecompressor(max_window_size=CHUNK_BYTES)
    try:
        # Refuses truncated frames and trailing data.
        raw = decoder.decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ChunkRefused(Reason.MALFORMED, str(error)) from None
    if len(raw) != count:
        raise ChunkRefused(Reason.MALFORMED, f"{len(raw)} bytes where {count} were stated")
    return raw
