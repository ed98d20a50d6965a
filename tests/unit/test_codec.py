"""Frames: what we send is read back, and nothing else is."""

from __future__ import annotations

import contextlib
import os
import struct

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from lightyear_node.records import CHUNK_BYTES, Reason
from lightyear_node.transport.codec import (
    FRAME_BYTES_MAX,
    FrameRefused,
    decode_chunk,
    encode_chunk,
)

RAW = os.urandom(5000) + bytes(5000)
FRAME = encode_chunk(RAW)


@settings(max_examples=50)
@given(st.binary(max_size=20_000))
def test_round_trip(raw: bytes) -> None:
    assert decode_chunk(encode_chunk(raw), len(raw)) == raw


@pytest.mark.parametrize("raw", [os.urandom(CHUNK_BYTES), bytes(CHUNK_BYTES)])
def test_a_whole_chunk_fits(raw: bytes) -> None:
    frame = encode_chunk(raw)
    assert len(frame) <= FRAME_BYTES_MAX
    assert decode_chunk(frame, CHUNK_BYTES) == raw


def test_our_frames_state_their_size_and_nothing_superfluous() -> None:
    header = zstandard.get_frame_parameters(FRAME)
    assert header.content_size == len(RAW)
    assert (header.dict_id, header.has_checksum) == (0, False)


@given(st.integers(0, len(FRAME) - 1))
def test_every_truncation_is_refused(length: int) -> None:
    with pytest.raises(FrameRefused):
        decode_chunk(FRAME[:length], len(RAW))


def refused(frame: bytes, expected_bytes: int, monkeypatch: pytest.MonkeyPatch) -> Reason:
    """Refused by its header, that is: before the decompressor was even made."""

    def made(**_: object) -> None:
        raise AssertionError("the frame reached the decompressor")

    monkeypatch.setattr(zstandard, "ZstdDecompressor", made)
    with pytest.raises(FrameRefused) as caught:
        decode_chunk(frame, expected_bytes)
    return caught.value.reason


def test_a_bomb_is_refused_unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = zstandard.compress(bytes(64 << 20))
    assert len(bomb) < 10_000
    assert refused(bomb, CHUNK_BYTES, monkeypatch) is Reason.TOO_LARGE


def test_a_frame_that_states_a_tebibyte_is_refused_unopened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Magic; descriptor: 8-byte content size, single segment; then the size.
    frame = zstandard.FRAME_HEADER + bytes([0xE0]) + struct.pack("<Q", 1 << 40) + bytes(8)
    assert zstandard.get_frame_parameters(frame).content_size == 1 << 40
    assert refused(frame, CHUNK_BYTES, monkeypatch) is Reason.TOO_LARGE


def test_a_large_window_is_refused_unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    # Magic; descriptor: 4-byte content size; window of 2^27 bytes; then the size.
    frame = (
        zstandard.FRAME_HEADER + bytes([0x80, (27 - 10) << 3]) + struct.pack("<I", 100) + bytes(8)
    )
    assert zstandard.get_frame_parameters(frame).window_size == 1 << 27
    assert refused(frame, 100, monkeypatch) is Reason.TOO_LARGE


def test_a_dictionary_is_refused_unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    # Magic; descriptor: single segment, 1-byte dictionary number; number; 1-byte size.
    frame = zstandard.FRAME_HEADER + bytes([0x21, 7, 100]) + bytes(8)
    assert zstandard.get_frame_parameters(frame).dict_id == 7
    assert refused(frame, 100, monkeypatch) is Reason.MALFORMED


def test_a_frame_without_its_size_is_refused_unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(RAW)
    assert refused(frame, len(RAW), monkeypatch) is Reason.TOO_LARGE


def test_a_skippable_frame_is_refused_unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    skippable = struct.pack("<II", 0x184D2A50, 4) + b"abcd"
    assert refused(skippable, 4, monkeypatch) is Reason.MALFORMED
    assert refused(skippable + FRAME, len(RAW), monkeypatch) is Reason.MALFORMED


def test_a_frame_longer_than_any_of_ours_is_refused_unopened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert refused(FRAME + bytes(FRAME_BYTES_MAX), len(RAW), monkeypatch) is Reason.TOO_LARGE


@pytest.mark.parametrize("expected_bytes", [0, len(RAW) - 1, len(RAW) + 1, CHUNK_BYTES])
def test_another_length_than_expected_is_refused(expected_bytes: int) -> None:
    with pytest.raises(FrameRefused):
        decode_chunk(FRAME, expected_bytes)


@pytest.mark.parametrize("tail", [b"\0", FRAME, struct.pack("<II", 0x184D2A50, 0)])
def test_nothing_may_follow_the_frame(tail: bytes) -> None:
    with pytest.raises(FrameRefused):
        decode_chunk(FRAME + tail, len(RAW))


@pytest.mark.parametrize("frame", [b"", b"\x28", zstandard.FRAME_HEADER, b"PK\x03\x04" * 9])
def test_what_is_no_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(FrameRefused) as caught:
        decode_chunk(frame, 10)
    assert caught.value.reason is Reason.MALFORMED


@given(st.integers(0, len(FRAME) - 1), st.integers(1, 255))
def test_damage_is_refused_or_leaves_the_length_right(position: int, flip: int) -> None:
    """What the codec cannot see, the chunk's hash does; but memory stays bounded either way."""
    damaged = bytearray(FRAME)
    damaged[position] ^= flip
    with contextlib.suppress(FrameRefused):
        assert len(decode_chunk(bytes(damaged), len(RAW))) == len(RAW)
