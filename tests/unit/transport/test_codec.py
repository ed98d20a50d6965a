"""Frames decode to what was encoded, and every other frame is refused."""

from __future__ import annotations

import contextlib
import json
import os
import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from lightyear_node.storage.blobs import ChunkRefused
from lightyear_node.transport.codec import (
    ChunkGrid,
    decode_chunk,
    encode_chunk,
)
from lightyear_node.transport.limits import FRAME_BYTES_MAX
from lightyear_node.types import CHUNK_BYTES, Reason
from tests.support.tls_sites import frame_of, header_of, near

COUNT = 2500
HEADER = header_of("w", COUNT)
GRID = ChunkGrid(HEADER)
VALUES = np.random.default_rng(7).normal(0, 0.05, COUNT).astype(np.float32)
RAW = HEADER + VALUES.tobytes()
BASE = near(RAW, HEADER)
FRAME = encode_chunk(GRID, 0, RAW)
DELTA = encode_chunk(GRID, 0, RAW, BASE)
NOISE = os.urandom(COUNT)
PACKED = zstandard.compress(bytes(COUNT))

DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def planes(last: tuple[int, bytes], kind: int = 0) -> bytes:
    """A valid frame, except for its last plane."""
    return frame_of((0, NOISE), (0, NOISE), (1, PACKED), last, kind=kind)


# -- Round trips ----------------------------------------------------------------------------------


@settings(max_examples=100)
@given(st.sampled_from(list(DTYPES)), st.data())
def test_decoding_inverts_encoding(dtype: str, data: st.DataObject) -> None:
    width = DTYPES[dtype]
    elements = data.draw(st.integers(0, 300))
    grid = ChunkGrid(header_of("some.tensor", elements, dtype, width))
    content = data.draw(st.binary(min_size=width * elements, max_size=width * elements))
    other = data.draw(st.binary(min_size=width * elements, max_size=width * elements))
    raw, base = grid.header + content, grid.header + other
    assert decode_chunk(grid, 0, encode_chunk(grid, 0, raw)) == raw
    assert decode_chunk(grid, 0, encode_chunk(grid, 0, raw, base), base) == raw


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_differences_are_exact(dtype: str) -> None:
    """Between bit patterns at the edges: NaN, infinities and both zeros among them."""
    width = DTYPES[dtype]
    top = 1 << (8 * width - 1)
    edges = np.array([0, 1, top - 1, top, top + 1, 2 * top - 1], f"<u{width}")
    values, bases = (grid.ravel() for grid in np.meshgrid(edges, edges))
    grid = ChunkGrid(header_of("w", len(values), dtype, width))
    raw, base = grid.header + values.tobytes(), grid.header + bases.tobytes()
    frame = encode_chunk(grid, 0, raw, base)
    assert decode_chunk(grid, 0, frame, base) == raw


def test_a_file_may_have_elements_of_all_widths() -> None:
    """Runs and header span several chunks; each chunk is decoded separately."""
    half = CHUNK_BYTES // 2
    spans = {"a": ("F64", 0, 2), "b": ("F32", 2, 5), "c": ("BF16", 5, 7)}
    text = json.dumps(
        {
            name * 200_000: {
                "dtype": dtype,
                "shape": [],
                "data_offsets": [begin * half, end * half],
            }
            for name, (dtype, begin, end) in spans.items()
        }
    ).encode()
    text += b" " * (-len(text) % 8)
    grid = ChunkGrid(struct.pack("<Q", len(text)) + text)
    raw = grid.header + os.urandom(7 * half)
    base = near(raw, grid.header)
    assert grid.chunks == 5
    for index in range(grid.chunks):
        part = slice(index * CHUNK_BYTES, (index + 1) * CHUNK_BYTES)
        for base_chunk in (None, base[part]):
            frame = encode_chunk(grid, index, raw[part], base_chunk)
            assert decode_chunk(grid, index, frame, base_chunk) == raw[part]


@pytest.mark.parametrize("content", [os.urandom(CHUNK_BYTES), bytes(CHUNK_BYTES)])
def test_the_frame_of_a_whole_chunk_is_within_the_limit(content: bytes) -> None:
    grid = ChunkGrid(header_of("w", CHUNK_BYTES // 4))
    raw = (grid.header + content)[:CHUNK_BYTES]
    frame = encode_chunk(grid, 0, raw)
    assert len(frame) <= FRAME_BYTES_MAX
    assert decode_chunk(grid, 0, frame) == raw


# -- Sizes ----------------------------------------------------------------------------------------


def test_weights_compress_and_small_differences_compress_more() -> None:
    assert len(FRAME) < 0.9 * len(RAW)
    assert len(DELTA) < 0.6 * len(RAW)


def test_noise_is_stored_with_only_the_plane_headers_added() -> None:
    raw = HEADER + os.urandom(4 * COUNT)
    frame = encode_chunk(GRID, 0, raw)
    assert len(frame) == 1 + 4 * (5 + COUNT)


def test_differences_that_gain_nothing_are_not_sent() -> None:
    elsewhere = HEADER + os.urandom(4 * COUNT)
    frame = encode_chunk(GRID, 0, RAW, elsewhere)
    assert frame == FRAME
    assert decode_chunk(GRID, 0, frame, elsewhere) == RAW


def test_the_receiver_inserts_its_own_header() -> None:
    other = ChunkGrid(header_of("v", COUNT))
    assert decode_chunk(other, 0, FRAME) == other.header + RAW[len(HEADER) :]


def test_our_frames_state_their_size_and_have_no_optional_fields() -> None:
    begin = FRAME.index(zstandard.FRAME_HEADER)
    header = zstandard.get_frame_parameters(FRAME[begin:])
    assert header.content_size == COUNT
    assert (header.dict_id, header.has_checksum) == (0, False)


# -- Refusals -------------------------------------------------------------------------------------


@given(st.integers(0, len(FRAME) - 1))
def test_every_truncation_is_refused(length: int) -> None:
    with pytest.raises(ChunkRefused):
        decode_chunk(GRID, 0, FRAME[:length])


def refused(frame: bytes) -> Reason:
    with pytest.raises(ChunkRefused) as caught:
        decode_chunk(GRID, 0, frame)
    return caught.value.reason


@pytest.fixture
def only_valid_planes_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if any plane but the valid one reaches the decompressor."""
    actual = zstandard.ZstdDecompressor

    class OnlyTheValid:
        def __init__(self, **options: int) -> None:
            self._decompressor = actual(**options)

        def decompress(self, packed: bytes, **options: bool) -> bytes:
            assert packed == PACKED, "the frame reached the decompressor"
            return self._decompressor.decompress(packed, **options)

    monkeypatch.setattr(zstandard, "ZstdDecompressor", OnlyTheValid)


@pytest.mark.usefixtures("only_valid_planes_decompressed")
class TestRefusedBeforeDecompression:
    def test_a_valid_frame_is_decoded(self) -> None:
        assert len(decode_chunk(GRID, 0, planes((1, PACKED)))) == len(RAW)

    def test_a_decompression_bomb(self) -> None:
        bomb = zstandard.compress(bytes(64 << 20))
        assert len(bomb) < 10_000
        assert refused(planes((1, bomb))) is Reason.TOO_LARGE

    def test_a_frame_that_states_a_tebibyte(self) -> None:
        # Magic; descriptor: 8-byte content size, single segment; then the size.
        frame = zstandard.FRAME_HEADER + bytes([0xE0]) + struct.pack("<Q", 1 << 40) + bytes(8)
        assert zstandard.get_frame_parameters(frame).content_size == 1 << 40
        assert refused(planes((1, frame))) is Reason.TOO_LARGE

    def test_a_large_window(self) -> None:
        # Magic; descriptor: 4-byte content size; window of 2^27 bytes; then the size.
        frame = zstandard.FRAME_HEADER + bytes([0x80, (27 - 10) << 3])
        frame += struct.pack("<I", COUNT) + bytes(8)
        assert zstandard.get_frame_parameters(frame).window_size == 1 << 27
        assert refused(planes((1, frame))) is Reason.TOO_LARGE

    def test_a_dictionary(self) -> None:
        # Magic; descriptor: single segment, 1-byte dictionary number, 2-byte size less 256.
        frame = zstandard.FRAME_HEADER + bytes([0x61, 7]) + struct.pack("<H", COUNT - 256)
        frame += bytes(8)
        assert zstandard.get_frame_parameters(frame).dict_id == 7
        assert refused(planes((1, frame))) is Reason.MALFORMED

    def test_a_frame_without_its_size(self) -> None:
        frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(COUNT))
        assert refused(planes((1, frame))) is Reason.TOO_LARGE

    def test_a_skippable_frame(self) -> None:
        skippable = struct.pack("<II", 0x184D2A50, 4) + b"abcd"
        assert refused(planes((1, skippable))) is Reason.MALFORMED
        assert refused(planes((1, skippable + PACKED))) is Reason.MALFORMED

    def test_a_frame_over_the_size_limit(self) -> None:
        assert refused(FRAME + bytes(FRAME_BYTES_MAX)) is Reason.TOO_LARGE

    @pytest.mark.parametrize(
        ("count", "reason"),
        [
            (0, Reason.MALFORMED),
            (COUNT - 1, Reason.MALFORMED),
            (COUNT + 1, Reason.TOO_LARGE),
            (CHUNK_BYTES, Reason.TOO_LARGE),
        ],
    )
    def test_a_plane_of_another_length(self, count: int, reason: Reason) -> None:
        assert refused(planes((1, zstandard.compress(bytes(count))))) is reason
        if count < CHUNK_BYTES:
            assert refused(planes((0, bytes(count)))) is Reason.MALFORMED

    def test_a_length_beyond_the_frame(self) -> None:
        frame = bytearray(planes((0, NOISE)))
        frame[2:6] = struct.pack("<I", 0xFFFFFFFF)
        assert refused(bytes(frame)) is Reason.MALFORMED

    def test_an_unknown_method(self) -> None:
        assert refused(planes((2, NOISE))) is Reason.MALFORMED

    def test_differences_that_were_not_requested(self) -> None:
        assert refused(planes((0, NOISE), kind=1)) is Reason.MALFORMED

    @pytest.mark.parametrize("frame", [b"", b"\x28", zstandard.FRAME_HEADER, b"PK\x03\x04" * 9])
    def test_bytes_that_are_not_a_frame(self, frame: bytes) -> None:
        assert refused(frame) is Reason.MALFORMED


@pytest.mark.parametrize("tail", [b"\0", PACKED, struct.pack("<II", 0x184D2A50, 0)])
def test_trailing_data_is_refused(tail: bytes) -> None:
    assert refused(FRAME + tail) is Reason.MALFORMED
    assert refused(planes((1, PACKED + tail))) is Reason.MALFORMED


@given(st.integers(0, len(DELTA) - 1), st.integers(1, 255))
def test_a_damaged_frame_is_refused_or_has_the_right_length(position: int, flip: int) -> None:
    """The chunk's hash detects what the codec cannot; memory stays bounded either way."""
    damaged = bytearray(DELTA)
    damaged[position] ^= flip
    with contextlib.suppress(ChunkRefused):
        assert len(decode_chunk(GRID, 0, bytes(damaged), BASE)) == len(RAW)
