"""Headers are read as they were written, also by the safetensors library."""

from __future__ import annotations

import io

import safetensors
from hypothesis import given
from hypothesis import strategies as st

from lightyear_node.storage import safetensors_header
from lightyear_node.storage.safetensors_header import encode, entry, json_length, parse

ENTRIES = {"weight": entry("F32", (2, 1), 0, 8), "bias": entry("F16", (2,), 8, 12)}


def test_a_header_has_these_bytes() -> None:
    header = encode({"w": entry("F32", (1,), 0, 4)})
    text = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    assert header == b"\x38\0\0\0\0\0\0\0" + text.ljust(56)


def test_the_safetensors_library_reads_it() -> None:
    file = encode(ENTRIES, {"format": "pt"}) + bytes(12)
    assert {name for name, _ in safetensors.deserialize(file)} == ENTRIES.keys()


def test_metadata_comes_first_and_is_not_a_tensor() -> None:
    header = encode(ENTRIES, {"format": "pt"})
    assert header[8:].startswith(b'{"__metadata__":{"format":"pt"}')
    assert parse(header) == ENTRIES


@given(st.dictionaries(st.text(), st.integers(0, 9).map(lambda n: entry("F32", (n,), 0, 4 * n))))
def test_any_names_survive(entries: safetensors_header.Entries) -> None:
    entries.pop(safetensors_header.METADATA, None)
    header = encode(entries)
    assert len(header) % 8 == 0
    assert json_length(header) == len(header) - 8
    assert safetensors_header.read(io.BytesIO(header + b"tensors")) == header
    assert parse(header) == entries
