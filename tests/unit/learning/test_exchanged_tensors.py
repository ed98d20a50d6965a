"""Which tensors are exchanged: patterns and tied names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lightyear_node.errors import ConfigError
from lightyear_node.learning import exchanged, select
from lightyear_node.learning.exchanged_tensors import copy_with_ties, tied_names


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


class Tied(nn.Module):
    """The head shares the weight of the embedding, as in most language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight


class SharedStorage(nn.Module):
    """Two parameters that share storage; torch treats them as different."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = nn.Parameter(self.embedding.weight.detach())


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (["*"], ["*.running_*", "2.*"], {"0.weight", "0.bias", "1.weight", "1.bias"}),
        (["2.*"], [], {"2.weight", "2.bias"}),
        (["0.*", "*.bias"], ["1.*"], {"0.weight", "0.bias", "2.bias"}),
        (["*.weight"], ["*.weight.never"], {"0.weight", "1.weight", "2.weight"}),
    ],
)
def test_a_tensor_must_match_an_include_and_no_exclude(
    include: list[str], exclude: list[str], expected: set[str]
) -> None:
    assert exchanged(normed(), exclude, include).keys() == expected


def test_an_unmatched_include_is_an_error_and_an_unmatched_exclude_is_reported() -> None:
    assert select(normed(), exclude=["1.*", "backbone.*"]).unmatched == ("backbone.*",)
    with pytest.raises(ConfigError, match=r"include.*'haed\.\*'") as caught:
        select(normed(), include=["0.*", "haed.*"])
    assert "0.weight" in str(caught.value.hint)


@pytest.mark.parametrize(
    "patterns",
    [
        {"exclude": ["*"]},
        {"include": []},
        {"include": ["*.num_batches_tracked"]},
        {"include": ["0.*"], "exclude": ["?.weight", "?.bias"]},
    ],
)
def test_selecting_no_tensor_is_an_error(patterns: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no tensor is left") as caught:
        select(normed(), **patterns)
    assert "exclude" in str(caught.value.hint)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_an_unsupported_dtype_is_named_and_may_be_excluded(dtype: torch.dtype) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("phase", torch.zeros(1).to(dtype))
    with pytest.raises(ConfigError, match="phase"):
        exchanged(model)
    assert exchanged(model, ["phase"]).keys() == {"weight", "bias"}


@pytest.mark.parametrize("build", [Tied, SharedStorage])
def test_tied_weights_are_exchanged_once_under_their_first_name(build: type[nn.Module]) -> None:
    chosen = select(build())
    assert chosen.tied == {"head.weight": "embedding.weight"}
    assert "head.weight" not in chosen.tensors
    assert {"embedding.weight", "head.bias"} <= chosen.tensors.keys()


def test_overlapping_or_equal_tensors_are_not_tied() -> None:
    model = nn.Module()
    block = torch.randn(4, 4)
    for name, tensor in {
        "whole": block,
        "transposed": block.T,
        "row": block[0],
        "equal": block.clone(),
        "empty": torch.empty(0, 3),
        "other_empty": torch.empty(0, 3),
    }.items():
        model.register_buffer(name, tensor)
    assert tied_names(model) == {}
    assert len(exchanged(model)) == 6


@pytest.mark.parametrize("pattern", ["head.*", "embedding.*"])
def test_a_pattern_may_match_any_name_of_a_tied_tensor(pattern: str) -> None:
    """Excluding the head excludes the tied tensor under either name."""
    assert exchanged(Tied(), [pattern]).keys().isdisjoint({"embedding.weight", "head.weight"})
    assert "embedding.weight" in exchanged(Tied(), include=[pattern])


def test_a_module_used_twice_is_exchanged_once() -> None:
    shared = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model = nn.Sequential(shared, nn.ReLU(), shared)
    assert {name.partition(".")[0] for name in exchanged(model)} == {"0"}


@pytest.mark.parametrize("build", [Tied, SharedStorage])
def test_a_copy_keeps_the_ties_of_the_model(build: type[nn.Module]) -> None:
    model = build()
    if build is SharedStorage:
        assert tied_names(copy.deepcopy(model)) == {}  # deepcopy breaks the tie
    copied = copy_with_ties(model)
    assert tied_names(copied) == tied_names(model)
    with torch.no_grad():
        copied.state_dict()["embedding.weight"].zero_()
    assert not copied.state_dict()["head.weight"].any()
    assert model.state_dict()["head.weight"].any()


def test_extra_state_is_not_exchanged() -> None:
    class WithExtraState(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"seen": 3}

        def set_extra_state(self, state: dict[str, int]) -> None:
            pass

    assert exchanged(WithExtraState(2, 2)).keys() == {"weight", "bias"}
