"""Which layer is the final layer θ^(L), and whether its output is the model's output."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightyear_node.learning import FinalLayerKind, find_final_layers
from tests.support.module_hooks import has_forward_hooks


def final_layer(model: nn.Module, x: Tensor, name: str | None = None) -> tuple[str, FinalLayerKind]:
    head = find_final_layers(model, x, name)[0]
    return head.name, head.kind


def features() -> list[nn.Module]:
    return [nn.Linear(6, 5), nn.ReLU()]


@pytest.mark.parametrize(
    ("after", "kind"),
    [
        ([], FinalLayerKind.LINEAR),
        ([nn.Identity()], FinalLayerKind.LINEAR),
        ([nn.Flatten()], FinalLayerKind.LINEAR),
        ([nn.Unflatten(1, (3, 1))], FinalLayerKind.LINEAR),
        ([nn.ReLU()], FinalLayerKind.GENERAL),
        ([nn.ReLU(inplace=True)], FinalLayerKind.GENERAL),
        ([nn.Softmax(dim=1)], FinalLayerKind.GENERAL),
        ([nn.LogSoftmax(dim=1)], FinalLayerKind.GENERAL),
    ],
)
def test_only_reshaping_may_follow_a_linear_head(
    after: list[nn.Module], kind: FinalLayerKind
) -> None:
    head = nn.Linear(5, 3)
    nn.init.constant_(head.bias, 100.0)  # ReLU then changes no value: comparing values would fail
    model = nn.Sequential(*features(), head, *after)
    assert final_layer(model, torch.randn(4, 6)) == ("2", kind)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 2, 1),
        nn.Conv2d(4, 2, 3, padding=1),
        nn.Conv2d(4, 2, 5, padding="same"),
        nn.Conv2d(4, 2, 3, stride=2),
        nn.Conv2d(4, 2, 3, groups=2, dilation=2, padding="valid"),
    ],
)
def test_convolutions_with_zero_padding_have_a_closed_form(conv: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), conv)
    assert final_layer(model, torch.randn(2, 1, 8, 8)) == ("3", FinalLayerKind.CONV)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect")),
        nn.Sequential(nn.Conv2d(1, 2, 1), nn.Upsample(scale_factor=2)),
        nn.Sequential(nn.ConvTranspose2d(1, 2, 2, stride=2)),
        nn.Sequential(parametrizations.weight_norm(nn.Conv2d(1, 2, 1))),
        nn.Sequential(nn.utils.spectral_norm(nn.Conv2d(1, 2, 1))),
    ],
)
def test_other_heads_are_general(model: nn.Module) -> None:
    assert final_layer(model, torch.randn(2, 1, 8, 8)) == ("0", FinalLayerKind.GENERAL)


class Wired(nn.Module):
    """A network with two heads; `route` computes the output from them."""

    def __init__(self, route: Callable[[Wired, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = nn.Linear(6, 5)
        self.main = nn.Linear(5, 5)
        self.extra = nn.Linear(5, 5)
        self.route = route

    def forward(self, x: Tensor) -> Tensor:
        return self.route(self, self.body(x))


def ignores_extra(net: Wired, f: Tensor) -> Tensor:
    logits: Tensor = net.main(f)
    net.extra(f)  # called last, but the output does not depend on it
    return logits


def test_the_output_must_depend_on_the_head() -> None:
    """'the last module with a weight that the output depends on'"""
    x = torch.randn(4, 6)
    model = Wired(ignores_extra)
    assert final_layer(model, x) == ("main", FinalLayerKind.LINEAR)
    assert all(parameter.grad is None for parameter in model.parameters())
    frozen = Wired(lambda net, f: ignores_extra(net, f).relu()).requires_grad_(False)
    assert final_layer(frozen, x) == ("main", FinalLayerKind.GENERAL)


@pytest.mark.parametrize(
    "route",
    [
        lambda net, f: net.main(net.main(f)),  # called twice
        lambda net, f: net.main(f) + f,  # a residual around the head
        lambda net, f: net.main(f)[:, :3],  # a part of its output
        lambda net, f: net.main(f).reshape(-1, 1),  # outputs taken for samples
    ],
)
def test_other_wirings_are_general(route: Callable[[Wired, Tensor], Tensor]) -> None:
    assert final_layer(Wired(route), torch.randn(4, 6)) == ("main", FinalLayerKind.GENERAL)


def test_transposed_outputs_are_general() -> None:
    class Transposed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.t()

    assert final_layer(nn.Sequential(nn.Linear(6, 2), Transposed()), torch.randn(2, 6)) == (
        "0",
        FinalLayerKind.GENERAL,
    )


def test_tied_weights_are_general() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    model[2].weight = model[0].weight
    assert final_layer(model, torch.randn(4, 5)) == ("2", FinalLayerKind.GENERAL)


def test_a_subclass_with_its_own_forward_is_general() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    assert final_layer(nn.Sequential(Scaled(3, 2)), torch.randn(4, 3)) == (
        "0",
        FinalLayerKind.GENERAL,
    )


def test_a_name_narrows_the_search() -> None:
    x = torch.randn(4, 6)
    model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3), nn.ReLU())})
    model.forward = lambda inputs: model["net"](inputs)
    assert final_layer(model, x, "net.0") == ("net.0", FinalLayerKind.GENERAL)
    assert final_layer(model, x, "net") == ("net.1", FinalLayerKind.GENERAL)
    with pytest.raises(ValueError, match=r'did you mean "net\.0"'):
        find_final_layers(model, x, "nett.0")


def test_a_bare_layer_is_its_own_head() -> None:
    assert final_layer(nn.Linear(6, 3), torch.randn(4, 6)) == ("", FinalLayerKind.LINEAR)


def test_a_model_without_a_head_is_an_error_with_a_hint() -> None:
    with pytest.raises(ValueError, match="head="):
        find_final_layers(nn.Sequential(nn.Flatten()), torch.randn(2, 3))
    with pytest.raises(ValueError, match=r'"main"|main, extra'):
        find_final_layers(Wired(lambda net, f: f.detach().argmax(1).float()), torch.randn(2, 6))


def test_an_output_without_weights_is_an_error() -> None:
    class Pair(nn.Linear):
        def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(input), input

    with pytest.raises(ValueError, match="entry '1' of the model's output depends on no layer"):
        find_final_layers(Pair(3, 2), torch.randn(2, 3))


def test_the_search_restores_modes_and_hooks() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(), nn.Linear(5, 3)).train()
    model[0].eval()
    find_final_layers(model, torch.randn(4, 6))
    assert [module.training for module in model] == [False, True, True]
    assert not has_forward_hooks(model)
