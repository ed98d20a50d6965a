"""One chunk of weights as one zstd frame.

Owns the frame's shape.  Must not know files or peers.  A frame is judged by its header before
anything is allocated for it: the library's own `max_output_size` does not hold when a frame names
its size, and 32 kB can name a gigabyte.
"""

from __future__ import annotations

import zstandard

from lightyear_node.records import CHUNK_BYTES, Reason

LEVEL = 1
"""Weights hardly compress; higher levels cost time and gain nothing."""

FRAME_BYTES_MAX = CHUNK_BYTES + 4096
"""zstd stores what does not compress; its own bound is 1 MiB and 4 KiB for a chunk."""

_MAGIC = zstandard.FRAME_HEADER


class FrameRefused(ValueError):
    """Not the frame of the chunk that was due."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def encode_chunk(raw: bytes) -> bytes:
    # Made anew for every chunk, since one may not be shared between threads; it costs 0.1 ms.
    return zstandard.ZstdCompressor(
        level=LEVEL, write_content_size=True, write_checksum=False, write_dict_id=False
    ).compress(raw)


def decode_chunk(frame: bytes, expected_bytes: int) -> bytes:
    """The chunk's raw bytes: exactly `expected_bytes` of them, from exactly one whole frame."""
    _check_header(frame, expected_bytes)
    decoder = zstandard.ZstdDecompressor(max_window_size=CHUNK_BYTES)
    try:
        # Refuses a frame that is cut short, and one that anything follows.
        raw = decoder.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FrameRefused(Reason.MALFORMED, str(error)) from None
    if len(raw) != expected_bytes:
        raise FrameRefused(Reason.MALFORMED, f"{len(raw)} bytes where {expected_bytes} were stated")
    return raw


def _check_header(frame: bytes, expected_bytes: int) -> None:
    if len(frame) > FRAME_BYTES_MAX:
        raise FrameRefused(Reason.TOO_LARGE, f"a frame of {len(frame)} bytes")
    if not frame.startswith(_MAGIC):
        # Skippable frames begin differently, too.
        raise FrameRefused(Reason.MALFORMED, "not a zstd frame")
    try:
        header = zstandard.get_frame_parameters(frame)
    except zstandard.ZstdError as error:
        raise FrameRefused(Reason.MALFORMED, f"unreadable frame header: {error}") from None
    if header.content_size != expected_bytes:
        larger = header.content_size > expected_bytes
        raise FrameRefused(
            Reason.TOO_LARGE if larger else Reason.MALFORMED,
            f"the frame states {header.content_size} bytes, the chunk has {expected_bytes}",
        )
    if header.window_size > CHUNK_BYTES:
        raise FrameRefused(Reason.TOO_LARGE, f"a window of {header.window_size} bytes")
    if header.dict_id != 0:
        raise FrameRefused(Reason.MALFORMED, "a dictionary is named")
