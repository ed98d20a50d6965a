"""The weights file: canonical bytes, readable by safetensors, memory-mapped."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from lightyear_node.learning import (
    Layout,
    SchemaMismatch,
    Weights,
    exchanged,
    header_bytes,
    load_into,
    rounded,
    write,
)
from lightyear_node.learning.rules import MergeShare, weighted_mean
from lightyear_node.types import PeerName

SHORT = [torch.bfloat16, torch.float16]


def sample() -> dict[str, Tensor]:
    return {
        "b.half": torch.randn(3).half(),
        "a.single": torch.randn(2, 3),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 4),
        "bfloat": torch.randn(5).bfloat16(),
        "z.double": torch.randn(3).double(),
    }


def saved(path: Path, tensors: dict[str, Tensor]) -> Layout:
    layout = Layout.of(tensors)
    write(path, layout, tensors)
    return layout


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


def test_safetensors_reads_what_we_write(tmp_path: Path) -> None:
    tensors = sample()
    saved(tmp_path / "w", tensors)
    theirs = load_file(tmp_path / "w")
    assert theirs.keys() == tensors.keys()
    assert all(same(theirs[name], tensors[name]) for name in tensors)
    with safe_open(tmp_path / "w", framework="pt") as file:
        assert file.metadata() is None


def test_header_is_canonical() -> None:
    """No metadata, compact, sorted by (-itemsize, name), contiguous, padded to a multiple of 8."""
    tensors = sample()
    header = header_bytes(tensors)
    (length,) = struct.unpack("<Q", header[:8])
    assert len(header) == 8 + length
    assert len(header) % 8 == 0
    parsed = json.loads(header[8:])
    assert list(parsed) == ["z.double", "a.single", "empty", "scalar", "b.half", "bfloat"]
    assert header[8:].rstrip(b" ") == json.dumps(parsed, separators=(",", ":")).encode()
    offsets = [entry["data_offsets"] for entry in parsed.values()]
    assert offsets == [[0, 24], [24, 48], [48, 48], [48, 52], [52, 58], [58, 68]]
    assert header == header_bytes(dict(reversed(tensors.items())))
    assert Layout.of(tensors).schema == hashlib.sha256(header).hexdigest()


def test_header_is_frozen() -> None:
    """Sites of different versions must agree on these bytes."""
    text = b'{"head.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'
    expected = struct.pack("<Q", 72) + text.ljust(72)
    assert header_bytes({"head.weight": torch.zeros(2, 3)}) == expected


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=6),
        st.tuples(
            st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
            st.lists(st.integers(0, 4), max_size=3),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_any_tensors_survive_a_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    spec: dict[str, tuple[torch.dtype, list[int]]],
) -> None:
    path = tmp_path_factory.mktemp("any") / "w"
    tensors = {name: torch.randn(shape).to(dtype) for name, (dtype, shape) in spec.items()}
    layout = saved(path, tensors)
    assert path.stat().st_size == layout.file_bytes
    for entry in layout.entries.values():
        assert entry.begin % torch.empty((), dtype=entry.dtype).element_size() == 0
    with Weights(path, layout) as weights:
        assert list(weights) == list(layout.entries)
        assert all(same(weights[name], tensors[name]) for name in tensors)


def test_views_outlive_the_mapping_and_never_change_the_file(tmp_path: Path) -> None:
    tensors = sample()
    layout = saved(tmp_path / "w", tensors)
    before = (tmp_path / "w").read_bytes()
    with Weights(tmp_path / "w", layout) as weights:
        view = weights["a.single"]
        view += 1
    assert torch.equal(view, tensors["a.single"] + 1)
    assert (tmp_path / "w").read_bytes() == before
    with pytest.raises(ValueError, match="closed"):
        weights["a.single"]


def test_another_header_or_length_is_refused(tmp_path: Path) -> None:
    layout = saved(tmp_path / "w", sample())
    raw = (tmp_path / "w").read_bytes()
    for broken in (raw[:-1], raw + b"\0", raw[:40] + b"?" + raw[41:], b""):
        (tmp_path / "broken").write_bytes(broken)
        with pytest.raises(SchemaMismatch):
            Weights(tmp_path / "broken", layout)


def test_a_stream_must_follow_the_layout(tmp_path: Path) -> None:
    tensors = sample()
    layout = Layout.of(tensors)
    right = [(name, tensors[name]) for name in layout.entries]
    write(tmp_path / "w", layout, iter(right))
    whole = (tmp_path / "w").read_bytes()
    for wrong in (right[::-1], right[:-1], [*right, right[0]], [("z.double", torch.zeros(4))]):
        with pytest.raises(SchemaMismatch):
            write(tmp_path / "w", layout, iter(wrong))
        assert (tmp_path / "w").read_bytes() == whole  # the old file is unchanged
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


def test_only_floating_point_tensors_are_exchanged() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    assert "1.num_batches_tracked" in model.state_dict()
    assert exchanged(model).keys() == model.state_dict().keys() - {"1.num_batches_tracked"}
    local = exchanged(model, exclude=["*.running_*", "0.*"])
    assert local.keys() == {"1.weight", "1.bias"}
    assert not any(tensor.requires_grad for tensor in local.values())


def test_a_type_without_a_canonical_form_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="odd"):
        header_bytes({"odd": torch.zeros(2).to(torch.float8_e4m3fn)})


def test_channels_last_is_written_in_the_default_order(tmp_path: Path) -> None:
    conv = nn.Conv2d(2, 4, 3)
    conv.weight = nn.Parameter(conv.weight.detach().to(memory_format=torch.channels_last))
    saved(tmp_path / "w", exchanged(conv))
    assert torch.equal(load_file(tmp_path / "w")["weight"], conv.weight)


def test_loading_replaces_floats_and_leaves_the_rest(tmp_path: Path) -> None:
    ours, theirs = (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2))
    theirs(torch.randn(8, 2))
    theirs(torch.randn(8, 2))
    ours(torch.randn(8, 2))
    layout = saved(tmp_path / "w", exchanged(theirs))
    with Weights(tmp_path / "w", layout) as weights:
        load_into(ours, weights)
    assert all(same(exchanged(ours)[name], value) for name, value in exchanged(theirs).items())
    assert int(ours.state_dict()["1.num_batches_tracked"]) == 1
    with pytest.raises(SchemaMismatch, match="stray"):
        load_into(ours, {"stray": torch.zeros(1)})
    with pytest.raises(SchemaMismatch, match="bias"):
        load_into(ours, {"0.bias": torch.zeros(1)})  # would broadcast


def fail_if_clamped(count: int) -> None:
    raise AssertionError(f"{count} entries were too large")


def sent(path: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> tuple[Layout, Layout]:
    """Write the tensors as sent; return the model's own layout and the wire layout."""
    layout = Layout.of(tensors)
    wire = layout.shortened(dtype)
    write(path, wire, rounded(tensors, wire, fail_if_clamped))
    return layout, wire


@pytest.mark.parametrize("dtype", SHORT)
def test_wider_types_are_rounded_and_narrower_ones_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = sample()
    layout, wire = sent(tmp_path / "w", tensors, dtype)
    kept = {"b.half": torch.float16, "bfloat": torch.bfloat16}
    theirs = load_file(tmp_path / "w")
    for name, tensor in tensors.items():
        assert same(theirs[name], tensor.to(kept.get(name, dtype)))
    assert list(wire.entries) == sorted(tensors)  # all have the same item size now
    with Weights(tmp_path / "w", layout, wire) as weights:
        layout.check(weights)
        assert list(weights) == list(layout.entries)
        for name, tensor in tensors.items():
            assert same(weights[name], tensor.to(kept.get(name, dtype)).to(tensor.dtype))


@pytest.mark.parametrize("dtype", SHORT)
def test_a_rounded_file_has_half_the_size_and_rounding_is_idempotent(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    tensors = {"a": torch.randn(300, 100), "b": torch.randn(100)}
    layout, wire = sent(tmp_path / "w", tensors, dtype)
    data = layout.file_bytes - len(layout.header)
    assert (tmp_path / "w").stat().st_size == wire.file_bytes == len(wire.header) + data // 2
    assert wire.schema != layout.schema
    with Weights(tmp_path / "w", layout, wire) as weights:
        error = (weights["a"] - tensors["a"]).abs()
        assert 0 < float((error / tensors["a"].abs()).max()) <= torch.finfo(dtype).eps / 2
        sent(tmp_path / "again", dict(weights), dtype)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "w").read_bytes()


def test_a_file_with_another_layout_than_the_wires_is_refused(tmp_path: Path) -> None:
    layout, wire = sent(tmp_path / "short", sample(), torch.bfloat16)
    saved(tmp_path / "full", sample())
    for path, *layouts in (
        ("short", layout),
        ("full", layout, wire),
        ("short", layout, layout.shortened(torch.float16)),
    ):
        with pytest.raises(SchemaMismatch):
            Weights(tmp_path / path, *layouts)


def test_too_large_values_are_clamped_and_nonfinite_ones_kept() -> None:
    inf, nan = torch.inf, torch.nan
    values = {
        "w": torch.tensor([65519.0, 65520.0, -1e9, 3e38, inf, -inf, nan, 1e-7, 0.0]),
        "v": torch.tensor([1e300, -1.0], dtype=torch.float64),
    }
    layout, counts = Layout.of(values), []
    half = dict(rounded(values, layout.shortened(torch.float16), counts.append))
    top = 65504.0
    assert half["w"][:6].tolist() == [top, top, -top, top, inf, -inf]
    assert half["w"][6].isnan()
    assert half["v"].tolist() == [top, -1.0]
    assert sorted(counts) == [1, 3]
    counts.clear()
    bfloat = dict(rounded(values, layout.shortened(torch.bfloat16), counts.append))
    assert bfloat["v"][0] == torch.finfo(torch.bfloat16).max
    assert float(bfloat["w"][3]) == pytest.approx(3e38, rel=0.01)
    assert counts == [1]


def test_loading_keeps_tied_weights_tied(tmp_path: Path) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    load_into(model, {"0.weight": torch.full((3, 3), 5.0)})
    assert second.weight is first.weight
    assert bool((second.weight == 5).all())


def test_a_name_lookup_does_not_read_the_file(tmp_path: Path) -> None:
    layout = saved(tmp_path / "w", sample())
    weights = Weights(tmp_path / "w", layout)
    weights.close()
    assert "scalar" in weights
    assert "stray" not in weights


def twelve_files(folder: Path, dtype: torch.dtype | None) -> tuple[Layout, list[Weights]]:
    """Twelve files of 16 MiB each, or 8 MiB if rounded."""
    tensors = {f"{index}.weight": torch.randn(512, 1024) for index in range(8)}
    layout = Layout.of(tensors)
    wire = layout if dtype is None else layout.shortened(dtype)
    for peer in range(12):
        write(folder / str(peer), wire, rounded(tensors, wire, fail_if_clamped))
    return layout, [Weights(folder / str(peer), layout, wire) for peer in range(12)]


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_merging_many_files_holds_one_tensor_of_each(
    tmp_path: Path, dtype: torch.dtype | None
) -> None:
    layout, peers = twelve_files(tmp_path, dtype)
    shares = [MergeShare(PeerName(f"p{i}"), peer, 1 / 12) for i, peer in enumerate(peers)]
    process = psutil.Process()
    before, peak = process.memory_info().rss, 0
    for _ in weighted_mean(peers[0], shares):
        peak = max(peak, process.memory_info().rss)
    assert peak - before < 3 * layout.file_bytes  # all twelve would be 192 MiB


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_loading_a_file_holds_only_part_of_it(
    tmp_path: Path, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converted tensors are copies: they must not all exist at once."""
    monkeypatch.setattr("lightyear_node.learning.weights.LOAD_BYTES_MAX", 5 << 20)
    _, [weights, *_] = twelve_files(tmp_path, dtype)

    class RecordingModel(nn.Module):
        held: ClassVar[list[int]] = []

        def __init__(self) -> None:
            super().__init__()
            for index in range(8):
                self.add_module(str(index), nn.Linear(1024, 512, bias=False))

        def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
            self.held.append(sum(tensor.nbytes for tensor in state.values()))
            return super().load_state_dict(state, *args, **kwargs)

    model = RecordingModel()
    load_into(model, weights)
    assert all(torch.equal(model.state_dict()[name], weights[name]) for name in weights)
    assert RecordingModel.held == [6 << 20, 6 << 20, 4 << 20]
