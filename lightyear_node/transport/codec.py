"""One chunk of weights as the bytes that cross the wire, and back, exactly.

Owns the frame's layout.  Must not know files or peers.  Weights hardly compress as they lie: the
lower bytes of a float are noise and hide the regularity of the higher ones.  So the bytes of all
elements are sorted into planes, lowest bytes first, and each plane is compressed alone, or stored
where that gains nothing.  Against the chunk of the update before, elements are first replaced by
their difference, as integers, with the sign in the lowest bit: small steps leave the upper planes
almost empty.

    u8    0: the elements themselves; 1: differences from the same chunk of the base
    then, for each run of equally wide elements, for each plane:
    u8    0: stored; 1: one zstd frame that states its content's size
    u32   little-endian, the length of what follows
    …     the plane

The file's header never travels: the receiver puts its own in its place.  Whatever a frame says is
checked before anything is allocated for it: the library's own `max_output_size` does not hold when
a frame names its size, and 32 kB can name a gigabyte.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import zstandard

from lightyear_node.records import CHUNK_BYTES, Reason
from lightyear_node.store import chunk_count, chunk_length

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
"""As zstd's level 1, but with hardly any search for repetitions: a plane has none but runs of one
byte, and what is found by chance spoils the Huffman code.  Twice as fast, and a little smaller."""
GAIN_MIN = 0.02
"""A plane that shrinks by less is stored, which costs the receiver nothing."""
DELTA_IS_GOOD = 0.75
"""Differences that take less than this share of the raw bytes are not compared with the values."""
FRAME_BYTES_MAX = CHUNK_BYTES + 4096
"""A chunk whose every plane is stored, and the planes' heads."""

_VALUES, _DIFFERENCES = 0, 1
_STORED, _ZSTD = 0, 1
_HEAD = struct.Struct("<BI")
_MAGIC = zstandard.FRAME_HEADER
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}

Bytes: TypeAlias = bytes | bytearray | memoryview
Elements: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class FrameRefused(ValueError):
    """Not the frame of the chunk that was due."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring elements of one width; bytes from `begin` to `end`."""

    begin: int
    end: int
    width: int


class Grid:
    """Where the elements lie in a weights file of our own model; the same for all its updates."""

    def __init__(self, header: bytes) -> None:
        """`header` is our own: 8 bytes of length and the JSON of a safetensors file."""
        self.header = header
        entries = json.loads(header[8:])
        runs: list[Run] = []
        for entry in sorted(entries.values(), key=lambda entry: entry["data_offsets"]):
            begin, end = (len(header) + offset for offset in entry["data_offsets"])
            width = _WIDTHS[entry["dtype"]]
            if runs and runs[-1].width == width and runs[-1].end == begin:
                runs[-1] = Run(runs[-1].begin, end, width)
            elif begin < end:
                runs.append(Run(begin, end, width))
        if any(run.begin % run.width for run in runs):
            raise ValueError("an element would lie across two chunks")
        self._runs = runs
        self.raw_bytes = runs[-1].end if runs else len(header)
        self.chunks = chunk_count(self.raw_bytes)

    def runs(self, index: int) -> Iterator[Run]:
        """The runs in chunk `index`, counted from its beginning."""
        start = index * CHUNK_BYTES
        stop = start + CHUNK_BYTES
        for run in self._runs:
            if run.begin < stop and run.end > start:
                yield Run(max(run.begin, start) - start, min(run.end, stop) - start, run.width)

    def blank(self, index: int, buffer: bytearray) -> memoryview:
        """Chunk `index` with our own header in its place, and not yet anything else."""
        start = index * CHUNK_BYTES
        head = self.header[start : start + CHUNK_BYTES]
        chunk = memoryview(buffer)[: chunk_length(self.raw_bytes, index)]
        chunk[: len(head)] = head
        return chunk


def encode_chunk(grid: Grid, index: int, raw: Bytes, base: Bytes | None = None) -> bytes:
    """The shorter of the chunk's values and, where there is a base, its differences from that."""
    if base is None:
        return _encode(grid, index, raw, None)
    differences = _encode(grid, index, raw, base)
    if len(differences) < DELTA_IS_GOOD * len(raw):
        return differences
    return min(differences, _encode(grid, index, raw, None), key=len)


def decode_chunk(
    grid: Grid,
    index: int,
    frame: Bytes,
    base: Bytes | None = None,
    buffer: bytearray | None = None,
) -> memoryview:
    """The chunk's raw bytes; `base` only if differences were asked for.

    They lie in `buffer`, of a whole chunk's size, where that is given: new memory for every chunk
    would cost as much as decoding.
    """
    if len(frame) > FRAME_BYTES_MAX:
        raise FrameRefused(Reason.TOO_LARGE, f"a frame of {len(frame)} bytes")
    rest = memoryview(frame)
    kind = rest[0] if rest else None
    if kind not in (_VALUES, _DIFFERENCES):
        raise FrameRefused(Reason.MALFORMED, "a frame of no known kind")
    if kind == _DIFFERENCES and base is None:
        raise FrameRefused(Reason.MALFORMED, "differences that were not asked for")
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
        raise FrameRefused(Reason.MALFORMED, f"{len(rest)} bytes follow the last plane")
    return raw


def _encode(grid: Grid, index: int, raw: Bytes, base: Bytes | None) -> bytes:
    # Made anew for every chunk, since one may not be shared between threads; it costs nothing.
    encoder = zstandard.ZstdCompressor(compression_params=_PACKING)
    parts = [bytes([_VALUES if base is None else _DIFFERENCES])]
    for run in grid.runs(index):
        elements = _view(raw, run)
        if base is not None:
            elements = _differences(elements, _view(base, run))
        for place in range(run.width):
            plane = (elements >> elements.dtype.type(8 * place)).astype(np.uint8).data
            packed = encoder.compress(plane)
            if len(packed) <= (1 - GAIN_MIN) * len(plane):
                parts += [_HEAD.pack(_ZSTD, len(packed)), packed]
            else:
                parts += [_HEAD.pack(_STORED, len(plane)), plane]
    return b"".join(parts)


def _view(chunk: Bytes, run: Run) -> Elements:
    count = (run.end - run.begin) // run.width
    return np.frombuffer(chunk, dtype=f"<u{run.width}", count=count, offset=run.begin)


def _differences(elements: Elements, base: Elements) -> Elements:
    """Integers modulo their width, so that every difference has one; the sign becomes bit 0."""
    signed = (elements - base).view(f"<i{elements.itemsize}")
    sign = signed >> (8 * elements.itemsize - 1)
    signed <<= 1
    signed ^= sign
    folded: Elements = signed.view(elements.dtype)
    return folded


def _add(base: Elements, folded: Elements) -> None:
    """The inverse of `_differences`, in place: there is no room for copies at this speed."""
    one = folded.dtype.type(1)
    sign = folded & one
    np.negative(sign, out=sign)
    folded >>= one
    folded ^= sign
    folded += base


def _join(planes: list[Bytes], elements: Elements) -> None:
    """The inverse of splitting into planes, from the highest bytes to the lowest."""
    count = len(elements)
    elements[:] = np.frombuffer(planes[-1], np.uint8, count)
    for plane in reversed(planes[:-1]):
        elements <<= elements.dtype.type(8)
        elements |= np.frombuffer(plane, np.uint8, count)


def _plane(rest: memoryview, count: int) -> tuple[Bytes, memoryview]:
    """The next plane, of exactly `count` bytes, and what follows it."""
    if len(rest) < _HEAD.size:
        raise FrameRefused(Reason.MALFORMED, "the frame ends before its last plane")
    method, length = _HEAD.unpack_from(rest)
    packed, rest = rest[_HEAD.size : _HEAD.size + length], rest[_HEAD.size + length :]
    if len(packed) != length:
        raise FrameRefused(Reason.MALFORMED, "the frame ends within a plane")
    if method == _STORED:
        if length != count:
            raise FrameRefused(Reason.MALFORMED, f"a plane of {length} bytes, not {count}")
        return packed, rest
    if method != _ZSTD:
        raise FrameRefused(Reason.MALFORMED, f"a plane packed by method {method}")
    return _unpacked(bytes(packed), count), rest


def _unpacked(packed: bytes, count: int) -> bytes:
    if not packed.startswith(_MAGIC):
        # Skippable frames begin differently, too.
        raise FrameRefused(Reason.MALFORMED, "not a zstd frame")
    try:
        header = zstandard.get_frame_parameters(packed)
    except zstandard.ZstdError as error:
        raise FrameRefused(Reason.MALFORMED, f"unreadable frame header: {error}") from None
    if header.content_size != count:
        larger = header.content_size > count
        raise FrameRefused(
            Reason.TOO_LARGE if larger else Reason.MALFORMED,
            f"the frame states {header.content_size} bytes, the plane has {count}",
        )
    if header.window_size > CHUNK_BYTES:
        raise FrameRefused(Reason.TOO_LARGE, f"a window of {header.window_size} bytes")
    if header.dict_id != 0:
        raise FrameRefused(Reason.MALFORMED, "a dictionary is named")
    decoder = zstandard.ZstdDecompressor(max_window_size=CHUNK_BYTES)
    try:
        # Refuses a frame that is cut short, and one that anything follows.
        raw = decoder.decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FrameRefused(Reason.MALFORMED, str(error)) from None
    if len(raw) != count:
        raise FrameRefused(Reason.MALFORMED, f"{len(raw)} bytes where {count} were stated")
    return raw
