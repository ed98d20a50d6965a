"""Safetensors headers: the only module that reads or writes one.

    u64 little-endian   length N of the JSON
    N bytes             JSON: for each tensor its dtype, shape and data_offsets, which count from
                        the end of the header; optionally `__metadata__`, a map of strings

Written headers are compact and padded with spaces to a multiple of 8 bytes, so the tensors behind
them are aligned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, BinaryIO

LENGTH_BYTES = 8
METADATA = "__metadata__"

Entries = dict[str, dict[str, Any]]


def json_length(start: bytes) -> int:
    """The length of the JSON, from the first bytes of a file; unchecked."""
    return int.from_bytes(start[:LENGTH_BYTES], "little")


def read(file: BinaryIO) -> bytes:
    """The whole header, length included, of a trusted file that is at its beginning."""
    start = file.read(LENGTH_BYTES)
    return start + file.read(json_length(start))


def parse(header: bytes) -> Entries:
    """The tensors of a trusted header, in its order, without the metadata."""
    entries: Entries = json.loads(header[LENGTH_BYTES:])
    entries.pop(METADATA, None)
    return entries


def encode(entries: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """The header, length included; the metadata, if any, comes first."""
    plain = dict(entries) if metadata is None else {METADATA: dict(metadata), **entries}
    text = json.dumps(plain, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def entry(dtype: str, shape: tuple[int, ...], begin: int, end: int) -> dict[str, Any]:
    """One tensor; `begin` and `end` count from the end of the header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
