"""Which tensors travel: patterns, and names that are the same tensor."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lightyear_node.errors import ConfigError
from lightyear_node.learning import exchanged, select
from lightyear_node.learning.selection import tied_names, twin


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


class Tied(nn.Module):
    """The head is the embedding, as in most language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight


class Lent(nn.Module):
    """Two parameters in one memory: torch takes them for different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = nn.Parameter(self.embedding.weight.detach())


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        (["*"], ["*.running_*", "2.*"], {"0.weight", "0.bias", "1.weight", "1.bias"}),
        (["2.*"], [], {"2.weight", "2.bias"}),
        (["0.*", "*.bias"], ["1.*"], {"0.weight", "0.bias", "2.bias"}),
        (["*.weight"], ["*.weight.never"], {"0.weight", "1.weight", "2.weight"}),
    ],
)
def test_any_include_and_no_exclude(include: list[str], exclude: list[str], left: set[str]) -> None:
    assert exchanged(normed(), exclude, include).keys() == left


def test_what_matches_nothing_is_an_error_or_told() -> None:
    assert select(normed(), exclude=["1.*", "backbone.*"]).idle == ("backbone.*",)
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
def test_nothing_left_is_an_error(patterns: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no tensor is left") as caught:
        select(normed(), **patterns)
    assert "exclude" in str(caught.value.hint)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_a_type_that_cannot_travel_is_named_and_may_stay_at_home(dtype: torch.dtype) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("phase", torch.zeros(1).to(dtype))
    with pytest.raises(ConfigError, match="phase"):
        exchanged(model)
    assert exchanged(model, ["phase"]).keys() == {"weight", "bias"}


@pytest.mark.parametrize("build", [Tied, Lent])
def test_tied_weights_travel_once_under_their_first_name(build: type[nn.Module]) -> None:
    chosen = select(build())
    assert chosen.tied == {"head.weight": "embedding.weight"}
    assert "head.weight" not in chosen.tensors
    assert {"embedding.weight", "head.bias"} <= chosen.tensors.keys()


def test_what_only_overlaps_or_looks_alike_is_not_tied() -> None:
    model = nn.Module()
    block = torch.randn(4, 4)
    for name, tensor in {
        "whole": block,
        "turned": block.T,
        "row": block[0],
        "equal": block.clone(),
        "nothing": torch.empty(0, 3),
        "neither": torch.empty(0, 3),
    }.items():
        model.register_buffer(name, tensor)
    assert tied_names(model) == {}
    assert len(exchanged(model)) == 6


@pytest.mark.parametrize("pattern", ["head.*", "embedding.*"])
def test_a_tied_tensor_goes_by_all_its_names(pattern: str) -> None:
    """Excluding the head keeps it at home, by whatever name it would travel."""
    assert exchanged(Tied(), [pattern]).keys().isdisjoint({"embedding.weight", "head.weight"})
    assert "embedding.weight" in exchanged(Tied(), include=[pattern])


def test_a_module_used_twice_travels_once() -> None:
    shared = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model = nn.Sequential(shared, nn.ReLU(), shared)
    assert {name.partition(".")[0] for name in exchanged(model)} == {"0"}


@pytest.mark.parametrize("build", [Tied, Lent])
def test_a_twin_is_tied_as_the_model_is(build: type[nn.Module]) -> None:
    model = build()
    if build is Lent:
        assert tied_names(copy.deepcopy(model)) == {}  # torch's own copy parts them
    made = twin(model)
    assert tied_names(made) == tied_names(model)
    with torch.no_grad():
        made.state_dict()["embedding.weight"].zero_()
    assert not made.state_dict()["head.weight"].any()
    assert model.state_dict()["head.weight"].any()


def test_extra_state_is_left_alone() -> None:
    class Remembering(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"seen": 3}

        def set_extra_state(self, state: dict[str, int]) -> None:
            pass

    assert exchanged(Remembering(2, 2)).keys() == {"weight", "bias"}
