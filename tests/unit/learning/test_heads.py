"""Which layer is θ^(L), and when its output is the model's output."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightyear_node.learning import Kind, find_head


def of(model: nn.Module, x: Tensor, name: str | None = None) -> tuple[str, Kind]:
    head = find_head(model, x, name)
    return head.name, head.kind


def features() -> list[nn.Module]:
    return [nn.Linear(6, 5), nn.ReLU()]


@pytest.mark.parametrize(
    ("after", "kind"),
    [
        ([], Kind.LINEAR),
        ([nn.Identity()], Kind.LINEAR),
        ([nn.Flatten()], Kind.LINEAR),
        ([nn.Unflatten(1, (3, 1))], Kind.LINEAR),
        ([nn.ReLU()], Kind.GENERAL),
        ([nn.ReLU(inplace=True)], Kind.GENERAL),
        ([nn.Softmax(dim=1)], Kind.GENERAL),
        ([nn.LogSoftmax(dim=1)], Kind.GENERAL),
    ],
)
def test_what_follows_a_linear_head(after: list[nn.Module], kind: Kind) -> None:
    head = nn.Linear(5, 3)
    nn.init.constant_(head.bias, 100.0)  # no ReLU changes a value: looking at values would fail
    model = nn.Sequential(*features(), head, *after)
    assert of(model, torch.randn(4, 6)) == ("2", kind)


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
def test_convolutions_with_zero_padding_are_closed(conv: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), conv)
    assert of(model, torch.randn(2, 1, 8, 8)) == ("3", Kind.CONV)


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
    assert of(model, torch.randn(2, 1, 8, 8)) == ("0", Kind.GENERAL)


class Wired(nn.Module):
    """Two heads, of which `route` makes an output."""

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
    assert of(model, x) == ("main", Kind.LINEAR)
    assert all(parameter.grad is None for parameter in model.parameters())
    frozen = Wired(lambda net, f: ignores_extra(net, f).relu()).requires_grad_(False)
    assert of(frozen, x) == ("main", Kind.GENERAL)


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
    assert of(Wired(route), torch.randn(4, 6)) == ("main", Kind.GENERAL)


def test_samples_that_change_place_with_outputs_are_general() -> None:
    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.t()

    assert of(nn.Sequential(nn.Linear(6, 2), Turned()), torch.randn(2, 6)) == ("0", Kind.GENERAL)


def test_tied_weights_are_general() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    model[2].weight = model[0].weight
    assert of(model, torch.randn(4, 5)) == ("2", Kind.GENERAL)


def test_a_subclass_with_its_own_forward_is_general() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    assert of(nn.Sequential(Scaled(3, 2)), torch.randn(4, 3)) == ("0", Kind.GENERAL)


def test_a_name_narrows_the_search() -> None:
    x = torch.randn(4, 6)
    model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3), nn.ReLU())})
    model.forward = lambda inputs: model["net"](inputs)
    assert of(model, x, "net.0") == ("net.0", Kind.GENERAL)
    assert of(model, x, "net") == ("net.1", Kind.GENERAL)
    with pytest.raises(ValueError, match=r'did you mean "net\.0"'):
        find_head(model, x, "nett.0")


def test_a_bare_layer_is_its_own_head() -> None:
    assert of(nn.Linear(6, 3), torch.randn(4, 6)) == ("", Kind.LINEAR)


def test_a_model_without_a_head_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="head="):
        find_head(nn.Sequential(nn.Flatten()), torch.randn(2, 3))
    with pytest.raises(ValueError, match=r'"main"|main, extra'):
        find_head(Wired(lambda net, f: f.detach().argmax(1).float()), torch.randn(2, 6))


def test_a_model_that_returns_no_tensor_is_explained() -> None:
    class Pair(nn.Linear):
        def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(input), input

    with pytest.raises(ValueError, match="returns its logits"):
        find_head(Pair(3, 2), torch.randn(2, 3))


def test_finding_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(), nn.Linear(5, 3)).train()
    model[0].eval()
    find_head(model, torch.randn(4, 6))
    assert [module.training for module in model] == [False, True, True]
    assert not any(module._forward_hooks for module in model.modules())
