"""TransUNet in both sizes: shapes, parameters, names, and a few steps of training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional

from lightyear_node.lab.tasks.transunet import (
    StandardizedConv2d,
    TransUNet,
    small_transunet,
    transunet,
)

SIZES: dict[str, Callable[[], TransUNet]] = {"full": transunet, "small": small_transunet}


def without_memory(build: Callable[[], TransUNet]) -> TransUNet:
    """The network with the shapes of its tensors only."""
    with torch.device("meta"):
        return build()


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("size", "count"), [("full", 105_131_554), ("small", 5_715_778)])
def test_the_networks_have_their_sizes(size: str, count: int) -> None:
    assert parameter_count(without_memory(SIZES[size])) == count


def test_the_full_size_is_that_of_the_published_network() -> None:
    """105.28 million parameters: at 224 × 224, and with three channels of the first convolution."""
    model = without_memory(lambda: transunet(side=224))
    two_more_channels = 2 * model.resnet.get_submodule("stem.0").weight.numel()
    assert parameter_count(model) + two_more_channels == 105_276_066


@pytest.mark.parametrize(
    ("size", "digest"),
    [
        ("full", "1a238c6cf66d6485"),
        ("small", "d021e2a972437ef6"),
    ],
)
def test_names_and_shapes_of_the_tensors_stay_the_same(size: str, digest: str) -> None:
    """Saved models and updates on the wire have these names."""
    state = without_memory(SIZES[size]).state_dict()
    lines = [f"{name} {tuple(tensor.shape)}\n" for name, tensor in state.items()]
    assert {"resnet.stem.0.weight", "transformer.position", "head.weight"} <= state.keys()
    assert hashlib.sha256("".join(lines).encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("side", [32, 64])
def test_logits_have_the_resolution_of_the_image(size: str, side: int) -> None:
    with torch.device("meta"):
        model = SIZES[size](side=side)  # type: ignore[call-arg]
        assert model(torch.zeros(3, 1, side, side)).shape == (3, 2, side, side)


def test_a_side_that_tokens_do_not_cover_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        small_transunet(side=40)


def test_no_tensor_of_weights_starts_at_zero() -> None:
    """The guard measures distances relative to a tensor's norm."""
    for name, parameter in small_transunet().named_parameters():
        if parameter.ndim >= 2:
            assert (parameter != 0).all(), name


def test_filters_are_standardized() -> None:
    plain = StandardizedConv2d(4, 6, 3)
    x = torch.randn(2, 4, 8, 8)
    before = plain(x)
    with torch.no_grad():
        plain.weight.mul_(100).add_(3)
    assert torch.allclose(plain(x), before, rtol=1e-2, atol=1e-2)
    assert before.var().item() == pytest.approx(4 * 9, rel=0.5)  # variance 1 per tap


def test_samples_do_not_influence_each_other_in_evaluation() -> None:
    model = small_transunet(side=32).eval()
    x = torch.randn(3, 1, 32, 32)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        together = model(x)
        assert torch.equal(together, model(x))
        one_by_one = vmap(lambda one: functional_call(model, parameters, (one[None],))[0])(x)
    assert torch.allclose(together, one_by_one, atol=1e-4)
    assert not torch.equal(model.train()(x), model(x))  # dropout


def test_steps_of_training_reach_every_parameter_and_lower_the_loss() -> None:
    model = small_transunet(side=32)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    x = torch.rand(4, 1, 32, 32)
    y = (functional.avg_pool2d(x, 5, stride=1, padding=2) > 0.5)[:, 0].long()
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.any(), name
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
