"""Other readings of the paper's score: class probabilities, the previous model, no bias."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightyear_node.errors import ConfigError, InvalidTask
from lightyear_node.lab.corrupted_updates import corrupt
from lightyear_node.learning import (
    Candidate,
    FinalLayerKind,
    ReferenceKernels,
    Validation,
    find_final_layers,
    make_rule,
    softmax_kernel,
)
from lightyear_node.learning.agreement import Reading
from lightyear_node.learning.jacobian import jacobian_kernel
from lightyear_node.learning.rules import Lightyear, RoundContext
from lightyear_node.types import PeerName, Reason, Round

SOFTMAX, UNBIASED = Reading(softmax=True), Reading(unbiased=True)


def image_net(head: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), head).double()


def vector_net(*head: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(7, 6), nn.Tanh(), *head).double()


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: vector_net(nn.Linear(6, 5)),
    "linear, without bias": lambda: vector_net(nn.Linear(6, 5, bias=False)),
    "one logit": lambda: vector_net(nn.Linear(6, 1)),
    "conv 1x1": lambda: image_net(nn.Conv2d(4, 3, 1)),
    "conv 3x3": lambda: image_net(nn.Conv2d(4, 2, 3, padding=1)),
    "conv 2x2, same": lambda: image_net(nn.Conv2d(4, 2, 2, padding="same", bias=False)),
    "conv, no padding": lambda: image_net(nn.Conv2d(4, 2, 3, padding="valid")),
    "conv, strided and dilated": lambda: image_net(
        nn.Conv2d(4, 2, 2, stride=2, padding=(1, 0), dilation=(1, 2))
    ),
    "conv, one logit": lambda: image_net(nn.Conv2d(4, 1, 3, padding=1)),
    "conv, grouped": lambda: image_net(nn.Conv2d(4, 2, 3, groups=2, padding=1)),
    "reshaped": lambda: vector_net(nn.Linear(6, 6), nn.Unflatten(1, (3, 2))),
    "no closed form": lambda: vector_net(nn.Linear(6, 3), nn.Tanh()),
}


def inputs(network: nn.Module) -> Tensor:
    images = any(isinstance(module, nn.Conv2d) for module in network.modules())
    return torch.randn(11, 1, 5, 6).double() if images else torch.randn(11, 7).double()


def softmax_of(prediction: Tensor) -> Tensor:
    return prediction.sigmoid() if prediction.shape[1] == 1 else prediction.softmax(1)


def alike(left: Tensor, right: Tensor) -> bool:
    """Whether two kernels are equal up to a factor."""
    return torch.allclose(left / left.norm(), right / right.norm(), atol=1e-12)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("bytes_max", [1 << 30, 9000])
@pytest.mark.parametrize("case", NETWORKS)
def test_the_kernel_of_the_probabilities_is_that_of_their_jacobians(
    case: str, bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax_kernel, "BYTES_MAX", bytes_max)
    network = NETWORKS[case]()
    batches = list(torch.split(inputs(network), 4))
    layer = replace(find_final_layers(network, batches[0])[0])
    general = replace(layer, kind=FinalLayerKind.GENERAL)
    seen: list[int] = []
    found = softmax_kernel.softmax_kernel(
        network, layer, batches, lambda index, output: seen.append(index)
    )
    oracle = jacobian_kernel(network, general, batches, of_prediction=softmax_of)
    assert alike(found, oracle)
    assert seen == [0, 1, 2]
    assert not alike(found, jacobian_kernel(network, general, batches))


def score(ours: nn.Module, theirs: nn.Module, batches: list[Any], reading: Reading) -> float:
    layers = find_final_layers(ours, batches[0])
    return ReferenceKernels(ours, batches, layers, reading=reading).agreement(theirs)


def test_probabilities_depend_on_the_head_and_logits_do_not() -> None:
    ours, theirs = vector_net(nn.Linear(6, 5)), vector_net(nn.Linear(6, 5))
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        theirs[2].weight.mul_(-30)
    batches = [torch.randn(30, 7).double()]
    assert score(ours, theirs, batches, Reading()) == pytest.approx(1)
    assert score(ours, theirs, batches, SOFTMAX) < 0.9


class Rows(nn.Module):
    """Returns row k of a table as the features of input k, followed by a linear head."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = nn.Parameter(rows)
        self.head = nn.Linear(rows.shape[1], 2, dtype=rows.dtype)

    def forward(self, index: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rows[index])
        return logits


def hsic_1(k: Tensor, m: Tensor) -> float:
    """Song et al. 2012, equation 5, term by term."""
    n = len(k)
    k, m = k - torch.diag(k.diagonal()), m - torch.diag(m.diagonal())
    product = k @ m
    value = product.trace() + k.sum() * m.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * product.sum()
    return float(value / (n * (n - 3)))


@pytest.mark.parametrize("n", [4, 5, 9, 40])
def test_the_unbiased_agreement_is_hsic_1_normalised(n: int) -> None:
    f, g = torch.randn(n, 6).double() + 3, torch.randn(n, 8).double() - 2
    k, m = f @ f.T, g @ g.T
    expected = hsic_1(k, m) / (hsic_1(k, k) * hsic_1(m, m)) ** 0.5
    batches = list(torch.split(torch.arange(n), 3))
    assert score(Rows(f), Rows(g), batches, UNBIASED) == pytest.approx(expected, abs=1e-9)
    assert score(Rows(f), Rows(f), batches, UNBIASED) == pytest.approx(1)


def test_unrelated_models_have_an_unbiased_agreement_of_zero_on_average() -> None:
    """Where the score itself has its floor of d / (d + n)."""
    n, d = 12, 200
    batches = [torch.arange(n)]
    pairs = [(Rows(torch.randn(n, d).double()), Rows(torch.randn(n, d).double()))
             for _ in range(30)]  # fmt: skip
    unbiased = [score(*pair, batches, UNBIASED) for pair in pairs]
    assert abs(sum(unbiased) / len(unbiased)) < 0.06
    assert min(unbiased) < 0
    assert min(score(*pair, batches, Reading()) for pair in pairs) > 0.85
    layers = find_final_layers(pairs[0][0], batches[0])
    assert ReferenceKernels(pairs[0][0], batches, layers, reading=UNBIASED).floor == 0
    assert ReferenceKernels(pairs[0][0], batches, layers).floor == pytest.approx(d / (d + n))


def test_the_unbiased_agreement_needs_four_samples() -> None:
    network = vector_net(nn.Linear(6, 5))
    with pytest.raises(InvalidTask, match="needs 4 validation samples or more, not 3"):
        score(network, network, [torch.randn(3, 7).double()], UNBIASED)


def test_both_readings_can_be_combined() -> None:
    ours, theirs = vector_net(nn.Linear(6, 5)), vector_net(nn.Linear(6, 5))
    batches = [torch.randn(9, 7).double()]
    both = score(ours, theirs, batches, Reading(softmax=True, unbiased=True))
    others = [score(ours, theirs, batches, one) for one in (SOFTMAX, UNBIASED)]
    assert -1 <= both <= 1
    assert both not in others


def judged(rule: Lightyear, digits: Any, peers: list[Candidate], start: Any) -> Any:
    site = digits.sites[0]
    validation = Validation(site.model, site.batches)
    own = Candidate(PeerName("own"), site.weights)
    return rule.judge(own, peers, validation, RoundContext(Round(2), start=start)).verdicts


def others(digits: Any) -> list[Candidate]:
    return [Candidate(PeerName(f"p{i}"), site.weights) for i, site in enumerate(digits.sites[1:])]


@pytest.mark.parametrize("guard", [True, False])
def test_peers_are_compared_with_the_previous_model(digits: Any, guard: bool) -> None:
    start, peers = digits.start, others(digits)
    itself = Candidate(PeerName("start"), start)
    rule = Lightyear(guard=guard, reference="previous")
    usual = judged(Lightyear(guard=guard), digits, [itself, *peers], start)
    found = judged(rule, digits, [itself, *peers], start)
    assert found[0].checks["agreement"] == pytest.approx(1)
    assert usual[0].checks["agreement"] < 0.9999
    # Distance and loss are still compared with the trained model.
    for key in ("distance", "regret") if guard else ():
        assert [one.checks[key] for one in found] == [one.checks[key] for one in usual]
    # Without an earlier model, the trained one is the only reference.
    assert judged(rule, digits, peers, None) == judged(Lightyear(guard=guard), digits, peers, None)


@pytest.mark.parametrize("options", [{"output": "softmax"}, {"unbiased": True}])
@pytest.mark.parametrize("guard", [True, False])
def test_honest_models_are_accepted_under_every_reading(
    digits: Any, guard: bool, options: dict[str, Any]
) -> None:
    rule = Lightyear(guard=guard, **options)
    flipped = Candidate(PeerName("bad"), corrupt("sfa", digits.sites[1].weights, seed=0))
    verdicts = judged(rule, digits, [*others(digits), flipped], digits.start)
    assert [verdict.accepted for verdict in verdicts[:-1]] == [True] * 3
    usual = judged(Lightyear(guard=guard), digits, others(digits), digits.start)
    for verdict, one in zip(verdicts, usual, strict=False):
        assert verdict.checks["agreement"] != one.checks["agreement"]


class Negative(Validation):
    def measure(self, weights: Any) -> Any:
        return replace(super().measure(weights), agreement=-0.01)


@pytest.mark.parametrize(
    ("guard", "round", "reason"),
    [
        (False, 0, Reason.AGREEMENT_BELOW_TAU),
        (True, 2, Reason.AGREEMENT_BELOW_TAU),
        # The guard does not check the agreement of models that have just left a common start.
        (True, 0, Reason.OK),
    ],
)
def test_a_negative_agreement_is_below_every_tau(
    digits: Any, guard: bool, round: int, reason: Reason
) -> None:
    site = digits.sites[0]
    own = Candidate(PeerName("own"), site.weights)
    rule = Lightyear(tau=0, guard=guard, unbiased=True)
    context = RoundContext(Round(round), start=digits.start)
    validation = Negative(site.model, site.batches)
    [verdict] = rule.judge(own, others(digits)[:1], validation, context).verdicts
    assert verdict.reason is reason


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"output": "probabilities"}, "output is `logits` or `softmax`, not 'probabilities'"),
        ({"reference": "own"}, "reference is `trained` or `previous`, not 'own'"),
        ({"unbiased": 1}, "not a bool"),
    ],
)
def test_a_reading_that_does_not_exist_is_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        make_rule("lightyear", options)
