"""The closed form equals the paper's definition of the score.

"For each model, we compute the Jacobian of the network outputs with respect to the final-layer
parameters […] the kernel matrix is centered and Frobenius-normalized […] we define the NTK-based
agreement score via normalized kernel alignment."
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightyear_node.learning import (
    FinalLayer,
    FinalLayerKind,
    ReferenceKernels,
    agreement,
    find_final_layers,
    ntk_agreement,
    small_sample_floor,
)
from lightyear_node.learning.jacobian import jacobian_kernel
from tests.support.module_hooks import has_forward_hooks


def by_definition(ours: nn.Module, theirs: nn.Module, batches: list[Tensor]) -> float:
    """⟨HK_iH, HK_jH⟩ / (‖HK_iH‖ ‖HK_jH‖), with K from real Jacobians, H as a matrix."""
    n = sum(len(batch) for batch in batches)
    h = torch.eye(n, dtype=torch.float64) - torch.full((n, n), 1 / n, dtype=torch.float64)
    centred = []
    for model in (ours, theirs):
        head = FinalLayer(find_final_layers(model, batches[0])[0].name, FinalLayerKind.GENERAL)
        centred.append(h @ jacobian_kernel(model, head, batches) @ h)
    i, j = centred
    return float((i * j).sum() / (i.norm() * j.norm()))


def slow_kernel(model: nn.Module, layer: nn.Module, x: Tensor) -> Tensor:
    """Reference kernel: K_ab = (1/C) Σ_c ⟨∂h_c(x_a), ∂h_c(x_b)⟩, one gradient at a time."""
    model.eval()
    rows = []
    for sample in x:
        outputs = model(sample.unsqueeze(0)).reshape(-1)
        gradients = [
            gradient.reshape(-1)
            for output in outputs
            for gradient in torch.autograd.grad(output, list(layer.parameters()), retain_graph=True)
        ]
        rows.append(torch.cat(gradients))
    jacobian = torch.stack(rows)
    return jacobian @ jacobian.T / len(outputs)


def image_net(*head: nn.Module) -> nn.Sequential:
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), *head)
    norm = net[1]
    assert isinstance(norm, nn.BatchNorm2d)
    norm.running_var = torch.rand(4) + 0.5
    norm.running_mean = torch.randn(4)
    return net


def vector_net(hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(7, hidden), nn.Tanh(), nn.Dropout(0.5), nn.Linear(hidden, outputs)
    )


CLOSED: dict[str, Callable[[], nn.Module]] = {
    "linear, D < n": lambda: vector_net(6, 3),
    "linear, D > n": lambda: vector_net(40, 3),
    "one output": lambda: vector_net(6, 1),
    "without bias": lambda: nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 2, bias=False)),
    "tokens": lambda: nn.Sequential(
        nn.Unflatten(1, (7, 1)), nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 2)
    ),
    "conv 1x1": lambda: image_net(nn.Conv2d(4, 2, 1)),
    "conv 3x3": lambda: image_net(nn.Conv2d(4, 2, 3, padding=1)),
    "conv 5x5": lambda: image_net(nn.Conv2d(4, 2, 5, padding="same")),
    "conv 2x2, same": lambda: image_net(nn.Conv2d(4, 2, 2, padding="same")),
    "conv, no padding": lambda: image_net(nn.Conv2d(4, 2, 3)),
    "conv, strided": lambda: image_net(nn.Conv2d(4, 2, 3, stride=2, padding=(1, 0))),
    "conv, dilated": lambda: image_net(nn.Conv2d(4, 2, 3, dilation=2, padding="same")),
    "conv, grouped": lambda: image_net(nn.Conv2d(4, 2, 3, groups=2, padding=1)),
    "conv, one output": lambda: image_net(nn.Conv2d(4, 1, (5, 6))),
}

GENERAL: dict[str, Callable[[], nn.Module]] = {
    "softmax": lambda: nn.Sequential(vector_net(6, 3), nn.Softmax(dim=1)),
    "weight norm": lambda: nn.Sequential(
        nn.Linear(7, 5), nn.Tanh(), parametrizations.weight_norm(nn.Linear(5, 3))
    ),
    "upsampled": lambda: image_net(nn.Conv2d(4, 2, 1), nn.Upsample(scale_factor=2)),
    "reflected": lambda: image_net(nn.Conv2d(4, 2, 3, padding=1, padding_mode="reflect")),
}


def inputs(model: nn.Module) -> Tensor:
    images = any(isinstance(module, nn.Conv2d) for module in model.modules())
    return torch.randn(17, 1, 5, 6).double() if images else torch.randn(17, 7).double()


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("case", CLOSED)
def test_the_closed_form_equals_the_jacobian_kernel(case: str) -> None:
    ours, theirs = CLOSED[case]().double(), CLOSED[case]().double()
    x = inputs(ours)
    batches = list(torch.split(x, 5))
    assert find_final_layers(ours, x)[0].kind is not FinalLayerKind.GENERAL
    score = ntk_agreement(ours, theirs, batches)
    assert score == pytest.approx(by_definition(ours, theirs, batches), abs=1e-12)
    assert 0.05 < score < 0.999  # two different networks: a constant would fail


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("case", GENERAL)
def test_heads_without_a_closed_form_are_scored_by_definition(case: str) -> None:
    ours, theirs = GENERAL[case]().double(), GENERAL[case]().double()
    x = inputs(ours)
    assert find_final_layers(ours, x)[0].kind is FinalLayerKind.GENERAL
    score = ntk_agreement(ours, theirs, torch.split(x, 5))
    assert score == pytest.approx(by_definition(ours, theirs, [x]), abs=1e-12)


@pytest.mark.parametrize("pieces", [1 << 25, 200])
def test_the_jacobian_kernel_equals_one_gradient_at_a_time(
    pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightyear_node.learning.jacobian.JACOBIAN_ENTRIES_MAX", pieces)
    monkeypatch.setattr("lightyear_node.learning.jacobian.VJP_ENTRIES_MAX", pieces)
    model = nn.Sequential(vector_net(6, 3), nn.Softmax(dim=1)).double()
    x = inputs(model)
    head = find_final_layers(model, x)[0]
    kernel = jacobian_kernel(model, head, list(torch.split(x, 5)))
    assert torch.allclose(kernel, slow_kernel(model, model.get_submodule(head.name), x), atol=1e-12)


def test_single_precision_is_close_to_the_definition() -> None:
    ours, theirs = (
        image_net(nn.Conv2d(4, 2, 3, padding=1)),
        image_net(nn.Conv2d(4, 2, 3, padding=1)),
    )
    x = torch.randn(40, 1, 16, 16)
    definition = by_definition(ours, theirs, [x])
    assert ntk_agreement(ours, theirs, torch.split(x, 8)) == pytest.approx(definition, abs=1e-6)


class Table(nn.Module):
    """Returns row k of a table as the features of input k, followed by a linear head."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = nn.Parameter(rows)
        self.head = nn.Linear(rows.shape[1], 3, dtype=rows.dtype)

    def forward(self, index: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rows[index])
        return logits


def score(left: Tensor, right: Tensor, size: int = 7) -> float:
    return ntk_agreement(Table(left), Table(right), torch.split(torch.arange(len(left)), size))


def random_rows(n: int, d: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return rows + 3 * torch.randn(d, generator=generator, dtype=torch.float64)  # a large mean


shapes = st.tuples(st.integers(3, 24), st.integers(1, 24), st.integers(1, 24), st.integers(0, 999))


@given(shapes)
@settings(max_examples=60, deadline=None)
def test_the_score_is_symmetric_bounded_and_one_for_the_same_model(
    shape: tuple[int, int, int, int],
) -> None:
    n, d_i, d_j, seed = shape  # the widths may differ
    ours, theirs = random_rows(n, d_i, seed), random_rows(n, d_j, seed + 1)
    value = score(ours, theirs)
    assert 0 <= value <= 1
    assert value == pytest.approx(score(theirs, ours), abs=1e-9)
    assert score(ours, ours.clone()) == pytest.approx(1, abs=1e-12)


@given(shapes, st.floats(1e-3, 1e3), st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_the_score_ignores_scale_rotation_shift_and_batch_size(
    shape: tuple[int, int, int, int], scale: float, size: int
) -> None:
    n, d_i, d_j, seed = shape
    ours, theirs = random_rows(n, d_i, seed), random_rows(n, d_j, seed + 1)
    rotation, _ = torch.linalg.qr(random_rows(d_j, d_j, seed + 2))
    value = score(ours, theirs)
    assert score(ours, scale * theirs @ rotation + 1) == pytest.approx(value, abs=1e-9)
    assert score(ours, theirs, size) == pytest.approx(value, abs=1e-9)


@given(shapes)
@settings(max_examples=40, deadline=None)
def test_moments_and_gram_give_the_same_score(shape: tuple[int, int, int, int]) -> None:
    """Zero columns leave the kernel unchanged but give more features than samples."""
    n, d_i, d_j, seed = shape
    ours, theirs = random_rows(n, d_i, seed), random_rows(n, d_j, seed + 1)
    zeros = torch.zeros(n, n).double()
    ours_wide, theirs_wide = torch.cat([ours, zeros], 1), torch.cat([theirs, zeros], 1)
    expected = score(ours_wide, theirs_wide)
    assert score(ours, theirs) == pytest.approx(expected, abs=1e-9)
    assert score(ours, theirs_wide) == pytest.approx(expected, abs=1e-9)
    assert score(ours_wide, theirs) == pytest.approx(expected, abs=1e-9)


def test_features_beyond_the_memory_limit_need_more_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Table(random_rows(23, 40, 0)), Table(random_rows(23, 40, 1))
    batches = torch.split(torch.arange(23), 3)
    expected = ntk_agreement(ours, theirs, batches)
    passes: list[int] = []
    theirs.register_forward_pre_hook(lambda module, args: passes.append(len(args[0])))
    monkeypatch.setattr(agreement, "FEATURE_BYTES_MAX", 3 * 3 * 40 * 8)
    seen: list[int] = []
    reference = ReferenceKernels(ours, batches, find_final_layers(ours, batches[0]))
    value = reference.agreement(theirs, on_output=lambda index, output: seen.append(index))
    assert value == pytest.approx(expected, abs=1e-12)
    assert sum(passes) == 23 + 14 + 5  # three batches of three are held at a time
    assert seen == list(range(8))  # logits are delivered once


@pytest.mark.parametrize("width", [4, 40])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("row", [0, 5])
def test_nonfinite_features_have_no_score(width: int, value: float, row: int) -> None:
    good, bad = random_rows(17, width, 0), random_rows(17, width, 1)
    bad[row, 1] = value
    assert math.isnan(score(good, bad))
    assert math.isnan(score(bad, good))


@pytest.mark.parametrize("width", [4, 40])
@pytest.mark.parametrize("value", [0.0, 0.1, 1e30])
def test_constant_features_score_zero(width: int, value: float) -> None:
    """The score would be 0/0; it is defined as 0."""
    dead = torch.full((17, width), value)
    assert score(random_rows(17, width, 0).float(), dead) == 0.0
    assert score(dead, dead.clone()) == 0.0


def test_the_score_does_not_depend_on_the_head() -> None:
    """The reason for the guard: a flipped or huge head scores like an honest one."""
    ours, theirs = vector_net(6, 3), vector_net(6, 3)
    x = torch.randn(30, 7)
    before = ntk_agreement(ours, theirs, [x])
    with torch.no_grad():
        for parameter in theirs[3].parameters():
            parameter.mul_(-1e6)
    assert ntk_agreement(ours, theirs, [x]) == before


def test_dropout_is_off_and_modes_are_restored() -> None:
    ours, theirs = vector_net(6, 3).train(), vector_net(6, 3).train()
    ours[0].eval()
    x = torch.randn(30, 7)
    assert ntk_agreement(ours, theirs, [x]) == ntk_agreement(ours, theirs, [x])
    assert [module.training for module in ours] == [False, True, True, True]
    assert ours.training
    assert theirs.training
    assert not has_forward_hooks(ours)


def test_batchnorm_statistics_are_not_changed() -> None:
    model = image_net(nn.Conv2d(4, 2, 1)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ntk_agreement(model, model, [torch.randn(6, 1, 5, 6)])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_model_that_raises_has_its_modes_and_hooks_restored() -> None:
    model = vector_net(6, 3).train()
    batches = [torch.randn(5, 7)]
    reference = ReferenceKernels(model, batches, find_final_layers(model, batches[0]))
    batches[0] = torch.randn(5, 8)
    with pytest.raises(RuntimeError):
        reference.agreement(model)
    assert all(module.training for module in model.modules())
    assert not has_forward_hooks(model)


def batch_formats(x: Tensor) -> list[Any]:
    y = torch.zeros(len(x), dtype=torch.long)
    pairs = list(zip(torch.split(x, 4), torch.split(y, 4), strict=True))
    return [
        torch.split(x, 4),
        pairs,
        [list(pair) for pair in pairs],
        [{"image": image, "label": label} for image, label in pairs],
        iter(pairs),
    ]


def test_every_batch_format_is_read() -> None:
    ours, theirs = vector_net(6, 3), vector_net(6, 3)
    x = torch.randn(10, 7)
    scores = {ntk_agreement(ours, theirs, batches) for batches in batch_formats(x)}
    assert len(scores) == 1


def test_a_loader_that_shuffles_is_iterated_once() -> None:
    class Shuffling:
        def __iter__(self) -> Iterator[Tensor]:
            return iter(torch.split(x[torch.randperm(len(x))], 4))

    x = torch.randn(12, 7)
    model = vector_net(6, 3)
    assert ntk_agreement(model, model, Shuffling()) == pytest.approx(1)


def test_each_architecture_has_its_own_head() -> None:
    x = torch.randn(17, 7).double()
    ours = vector_net(6, 3).double()
    deep = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 9))
    deep.double()
    soft = nn.Sequential(vector_net(6, 4), nn.Softmax(dim=1)).double()
    for theirs in (deep, soft):
        expected = pytest.approx(by_definition(ours, theirs, [x]), abs=1e-12)
        assert ntk_agreement(ours, theirs, [x]) == expected
        assert ntk_agreement(theirs, ours, [x]) == expected


def test_an_empty_validation_set_is_refused() -> None:
    with pytest.raises(ValueError, match="no batches"):
        ntk_agreement(vector_net(6, 3), vector_net(6, 3), [])


def test_independent_features_score_the_small_sample_floor() -> None:
    n, d = 100, 400
    values = [score(random_rows(n, d, 2 * k), random_rows(n, d, 2 * k + 1)) for k in range(5)]
    assert sum(values) / 5 == pytest.approx(small_sample_floor(d, n), abs=0.03)
    assert small_sample_floor(1280, 100) == pytest.approx(0.93, abs=0.005)


def test_the_reference_is_computed_once() -> None:
    model = vector_net(6, 3)
    passes: list[int] = []
    model.register_forward_pre_hook(lambda module, args: passes.append(len(args[0])))
    batches = list(torch.split(torch.randn(40, 7), 10))
    reference = ReferenceKernels(model, batches, find_final_layers(model, batches[0]))
    before = len(passes)
    for _ in range(3):
        reference.agreement(vector_net(6, 3))
    assert len(passes) == before
    assert (reference.samples, reference.floor) == (40, 6 / 46)
