"""Compiled and parallel models have plain names, and share their tensors with the original."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightyear_node.learning import exchanged, load_into, ntk_agreement
from lightyear_node.learning.exchanged_tensors import copy_with_ties
from lightyear_node.learning.wrappers import without_wrappers
from tests.support.tiny_site import TinySite


class Net(nn.Module):
    """A child is named as the attribute of a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.module(x))
        return logits


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def compiled_part(module: nn.Module) -> nn.Module:
    module.module[0] = compiled(module.module[0])  # type: ignore[index, operator]
    return module


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": compiled,
    "compiled part": compiled_part,
    "compiled in place": compiled_in_place,
    "parallel": nn.DataParallel,
    "compiled and parallel": lambda module: nn.DataParallel(compiled(module)),
}


@pytest.mark.parametrize("kind", WRAPPINGS)
def test_names_are_those_of_the_plain_model(kind: str) -> None:
    plain, wrapped = Net(), WRAPPINGS[kind](Net())
    assert list(exchanged(wrapped)) == list(exchanged(plain))
    assert list(copy_with_ties(wrapped).state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("kind", WRAPPINGS)
def test_tensors_are_shared_with_the_wrapped_model(kind: str) -> None:
    plain, wrapped = Net(), WRAPPINGS[kind](Net())
    load_into(wrapped, exchanged(plain))
    x = torch.randn(8, 4)
    # Statistics that training replaces are seen, too.
    for model in (plain, wrapped):
        model.train()
        model(x)
        model.eval()
    with torch.no_grad():
        assert torch.equal(wrapped(x), plain(x))
        assert torch.equal(without_wrappers(wrapped).eval()(x), plain(x))
    state = without_wrappers(wrapped).state_dict()
    assert torch.equal(state["module.1.running_mean"], plain.state_dict()["module.1.running_mean"])


@pytest.mark.parametrize("kind", WRAPPINGS)
def test_a_wrapped_model_agrees_with_its_plain_copy(kind: str) -> None:
    plain, wrapped = Net(), WRAPPINGS[kind](Net())
    load_into(wrapped, exchanged(plain))
    batches = [torch.randn(20, 4)]
    assert ntk_agreement(plain, wrapped, batches) == pytest.approx(1.0)


def test_a_model_without_wrappers_is_returned_itself() -> None:
    model = Net()
    assert without_wrappers(model) is model


def test_a_part_that_is_used_twice_stays_one_part() -> None:
    part = compiled(nn.Linear(4, 4))
    plain = without_wrappers(nn.Sequential(part, part))
    assert plain[0] is plain[1]  # type: ignore[index]
    assert list(exchanged(nn.Sequential(part, part))) == ["0.weight", "0.bias"]


@pytest.mark.parametrize("kind", WRAPPINGS)
def test_a_site_with_a_wrapped_model_sends_the_bytes_of_the_plain_one(
    tmp_path: Path, kind: str
) -> None:
    ran: list[type] = []

    def watched() -> nn.Module:
        model = WRAPPINGS[kind](Net())
        model.register_forward_hook(lambda module, args, output: ran.append(type(module)))
        return model

    plain, wrapped = (
        TinySite(tmp_path / name, model=model, epochs=1)
        for name, model in (("plain", Net), ("wrapped", watched))
    )
    for _ in range(2):
        for site in (plain, wrapped):
            site.train()
        assert plain.path("own").read_bytes() == wrapped.path("own").read_bytes()
        assert plain.metrics == wrapped.metrics
        peer = plain.path("own")
        for site in (plain, wrapped):
            site.finish_round({"site-b": peer})
            site.restart()
        assert plain.model.read_bytes() == wrapped.model.read_bytes()
    assert type(WRAPPINGS[kind](Net())) in ran
