"""Every built-in network: its final layer is found, and the closed form equals the definition."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from lightyear_node.errors import ConfigError
from lightyear_node.lab.tasks.medical_networks import densenet121, efficientnet_b0, transformer_unet
from lightyear_node.lab.tasks.networks import (
    PaperCNN,
    SmallBatchNormCNN,
    SmallCNN28,
    SmallMLP,
    SmallUNet,
)
from lightyear_node.lab.tasks.transunet import small_transunet, transunet
from lightyear_node.learning import FinalLayer, FinalLayerKind, find_final_layers, ntk_agreement
from lightyear_node.learning.jacobian import jacobian_kernel


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    """Shapes of one sample; small where the network allows it, since Jacobians are large."""
    head: FinalLayer
    samples: int = 6


CASES = {
    "paper CNN": Case(
        lambda: PaperCNN(classes=10), (1, 28, 28), (10,), FinalLayer("10", FinalLayerKind.LINEAR)
    ),
    "small CNN": Case(SmallCNN28, (1, 28, 28), (62,), FinalLayer("7", FinalLayerKind.LINEAR)),
    "batch norm CNN, 48": Case(
        lambda: SmallBatchNormCNN(2),
        (3, 48, 48),
        (2,),
        FinalLayer("14", FinalLayerKind.LINEAR),
        samples=70,
    ),
    "batch norm CNN, 64": Case(
        lambda: SmallBatchNormCNN(8), (3, 64, 64), (8,), FinalLayer("14", FinalLayerKind.LINEAR)
    ),
    "U-Net": Case(SmallUNet, (1, 16, 16), (2, 16, 16), FinalLayer("head", FinalLayerKind.CONV)),
    "MLP": Case(
        lambda: SmallMLP(26), (26,), (1,), FinalLayer("4", FinalLayerKind.LINEAR), samples=40
    ),
    "DenseNet121": Case(
        densenet121,
        (3, 32, 32),
        (2,),
        FinalLayer("class_layers.out", FinalLayerKind.LINEAR),
        samples=4,
    ),
    "EfficientNet-b0": Case(
        efficientnet_b0, (3, 32, 32), (8,), FinalLayer("_fc", FinalLayerKind.LINEAR), samples=4
    ),
    "transformer U-Net": Case(
        lambda: transformer_unet(side=32),
        (1, 32, 32),
        (2, 32, 32),
        FinalLayer("out.conv.conv", FinalLayerKind.CONV),
        samples=4,
    ),
    "small TransUNet": Case(
        lambda: small_transunet(side=32),
        (1, 32, 32),
        (2, 32, 32),
        FinalLayer("head", FinalLayerKind.CONV),
        samples=4,
    ),
    "TransUNet": Case(
        lambda: transunet(side=32),
        (1, 32, 32),
        (2, 32, 32),
        FinalLayer("head", FinalLayerKind.CONV),
        samples=4,
    ),
}

LARGE = {"TransUNet"}
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name for name in CASES]


def with_statistics(case: Case, x: Tensor) -> nn.Module:
    """A network whose batch normalisation has the statistics of the data.

    With initial statistics, features hardly differ after fifty layers, and the centred kernel of
    the definition consists of rounding errors.
    """
    model = case.build().double()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model(x)
    return model


def by_definition(ours: nn.Module, theirs: nn.Module, head: str, x: Tensor) -> float:
    n = len(x)
    h = torch.eye(n, dtype=torch.float64) - 1 / n
    i, j = (
        h @ jacobian_kernel(m, FinalLayer(head, FinalLayerKind.GENERAL), [x]) @ h
        for m in (ours, theirs)
    )
    return float((i * j).sum() / (i.norm() * j.norm()))


@pytest.mark.parametrize("name", NAMES)
def test_closed_form_equals_the_jacobians(name: str) -> None:
    case = CASES[name]
    x = torch.randn(case.samples, *case.inputs, dtype=torch.float64)
    ours, theirs = with_statistics(case, x), with_statistics(case, x)
    assert find_final_layers(ours, x) == (case.head,)
    assert ours.training  # with dropout, which scoring must turn off
    score = ntk_agreement(ours, theirs, list(torch.split(x, 3)))
    assert score == pytest.approx(by_definition(ours, theirs, case.head.name, x), abs=1e-9)
    with torch.no_grad():
        assert ours.eval()(x).shape == (case.samples, *case.outputs)
    assert 0.001 < score < 0.9999  # two different networks, so neither 0 nor 1


@pytest.mark.parametrize("name", NAMES)
def test_the_federations_seed_gives_every_site_the_same_network(name: str) -> None:
    first, second = (_seeded(CASES[name].build) for _ in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def _seeded(build: Callable[[], nn.Module]) -> dict[str, Tensor]:
    torch.manual_seed(11)
    return build().state_dict()


def test_the_papers_network_has_the_papers_size() -> None:
    assert sum(parameter.numel() for parameter in PaperCNN().parameters()) == 1_690_046


@pytest.mark.parametrize("absent", ["monai", "einops"])
@pytest.mark.parametrize("build", [densenet121, efficientnet_b0, transformer_unet])
def test_without_monai_the_error_says_what_to_install(
    build: Callable[[], nn.Module], absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in list(sys.modules):
        if module == absent or module.startswith(absent + "."):
            monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        build()
    assert caught.value.hint is not None
    assert "lightyear-node[medical]" in caught.value.hint
