"""The guard's checks one by one, and all of them on trained networks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightyear_node.learning import Candidate, Probe, corrupt, exchanged, load_into, make_rule
from lightyear_node.learning.guard import Ruler, decide, recordable, regret_max, soundness
from lightyear_node.learning.rules import Turn
from lightyear_node.records import PeerName, Reason, Round, Verdict

Tensors = dict[str, Tensor]


def test_the_first_failing_check_names_the_reason() -> None:
    fine = {
        "distance": 0.2, "distance_max": 0.5, "agreement": 0.9, "tau": 0.6, "regret": 0.1,
        "regret_max": 0.3,
    }  # fmt: skip
    assert decide(fine) is Reason.OK
    assert decide(fine | {"regret": 0.4}) is Reason.LOSS_REGRET
    assert decide(fine | {"regret": 0.4, "agreement": 0.5}) is Reason.AGREEMENT_BELOW_TAU
    assert decide(fine | {"regret": 9, "agreement": 0, "distance": 0.6}) is Reason.TOO_FAR
    assert decide(fine | {"regret": math.nan}) is Reason.LOSS_REGRET
    assert decide({"agreement": 0.6, "tau": 0.6}) is Reason.OK  # A ≥ τ: equality is enough
    assert decide({}) is Reason.OK


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_one_bad_entry_is_found(value: float, dtype: torch.dtype) -> None:
    tensors = {"a": torch.ones(3), "empty": torch.ones(0), "b": torch.ones(2, 50, dtype=dtype)}
    assert soundness(tensors) is Reason.OK
    tensors["b"][1, 17] = value
    assert soundness(tensors) is Reason.NONFINITE


def test_a_variance_cannot_be_negative() -> None:
    tensors = {"norm.running_mean": -torch.ones(3), "norm.running_var": torch.zeros(3)}
    assert soundness(tensors) is Reason.OK
    tensors["norm.running_var"][1] = -1e-6
    assert soundness(tensors) is Reason.DOMAIN


def layers() -> Tensors:
    return {
        "a.weight": torch.full((4, 4), 1.0),  # norm 4
        "a.bias": torch.zeros(4),
        "b.weight": torch.full((2, 8), 0.5),  # norm 2
        "b.bias": torch.full((2,), 0.1),
        "norm.weight": torch.ones(9),  # norm 3
        "norm.bias": torch.zeros(9),
        "norm.running_mean": torch.zeros(9),
        "norm.running_var": torch.ones(9),
    }


def moved(tensors: Tensors, name: str, by: float) -> Tensors:
    """One tensor moved by a given Euclidean distance."""
    step = torch.full_like(tensors[name], by / math.sqrt(tensors[name].numel()))
    return tensors | {name: tensors[name] + step}


def test_distance_is_the_largest_relative_step_of_a_layer() -> None:
    """δ_l = ‖W_j − W_i‖_F / ‖W_i‖_F, of the layer that is nearest to its limit"""
    own = layers()
    ruler = Ruler.of(own)
    theirs = moved(moved(own, "a.weight", 1.0), "b.weight", 1.2)
    assert ruler.farthest(own, theirs)[0] == pytest.approx(1.2 / 2)
    assert ruler.farthest(own, own)[0] == 0.0
    assert ruler.farthest(own, {n: -t for n, t in own.items()})[0] == pytest.approx(2)


@pytest.mark.parametrize(
    ("step", "reach"), [(0.0, 0.5), (1.0, 0.5), (2.0, 0.75), (2.4, 0.9), (4.0, 1.0)]
)
def test_a_peer_may_be_somewhat_farther_than_our_own_step(step: float, reach: float) -> None:
    """κ_l = min(1, max(0.5, 1.5·s_l)), for each layer by its own step"""
    own = layers()
    start = moved(own, "a.weight", step)  # s_a = step / 4
    limits = Ruler.of(own, start).limits
    assert limits["a.weight"] == pytest.approx(reach)
    assert {limits[name] for name in limits if name != "a.weight"} == {0.5}


def test_a_site_that_was_alone_looks_farther() -> None:
    own = layers()
    start = moved(own, "a.weight", 1.0)  # s_a = 1/4
    limits = [Ruler.of(own, start, rounds_alone).limits["a.weight"] for rounds_alone in range(4)]
    assert limits == pytest.approx([0.5, 0.75, 1.0, 1.0])


def test_noise_shows_in_the_layer_that_hardly_moves() -> None:
    """A dense layer that moves by its own length must not excuse a convolution that does not."""
    own = layers()
    start = moved(own, "b.weight", 2.0)  # s_b = 1
    noisy = moved(moved(own, "a.weight", 2.4), "b.weight", 1.4)  # δ = 0.6 and 0.7
    assert Ruler.of(own, start).farthest(own, noisy) == pytest.approx((0.6, 0.5))


@pytest.mark.parametrize(
    ("name", "scale"), [("a.bias", 4.0), ("b.bias", 2.0), ("norm.bias", 3.0), ("norm.weight", 3.0)]
)
def test_vectors_are_measured_by_the_layer_they_belong_to(name: str, scale: float) -> None:
    own = layers()
    ruler = Ruler.of(own, moved(own, name, 3.0) if name == "a.bias" else None)
    expected = 1.0 / max(scale, 12.0 if name == "a.bias" else 0.0)
    assert ruler.farthest(own, moved(own, name, 1.0))[0] == pytest.approx(expected)
    assert ruler.limits[name] == 0.5  # a bias' own step stretches nothing but its own scale


def test_a_large_bias_is_its_own_scale() -> None:
    own = moved(layers(), "a.bias", 10.0)
    assert Ruler.of(own).farthest(own, moved(own, "a.bias", 5.0))[0] == pytest.approx(0.5)


def test_attention_and_reparametrised_layers_find_their_weight() -> None:
    own = {
        "mha.in_proj_weight": torch.full((4, 4), 1.0),
        "mha.in_proj_bias": torch.zeros(4),
        "mha.out_proj.weight": torch.full((2, 2), 100.0),
        "head.bias": torch.zeros(3),
        "head.parametrizations.weight.original0": torch.full((3, 1), 1e-3),
        "head.parametrizations.weight.original1": torch.full((3, 3), 2.0),
    }
    ruler = Ruler.of(own)
    assert ruler.farthest(own, moved(own, "mha.in_proj_bias", 1.0))[0] == pytest.approx(1 / 4)
    assert ruler.farthest(own, moved(own, "head.bias", 3.0))[0] == pytest.approx(3 / 6)


def test_a_loose_tensor_that_starts_at_zero_is_allowed_some_of_our_own_steps() -> None:
    """Position embeddings of zeros: honest sites move apart by more than their norm."""
    start = {"embed.position": torch.zeros(1, 64)}
    own = moved(start, "embed.position", 1.0)
    opposite = moved(start, "embed.position", -1.0)
    ruler = Ruler.of(own, start)
    assert ruler.farthest(own, opposite)[0] == pytest.approx(0.5)
    assert set(ruler.limits.values()) == {0.5}


def test_running_statistics_are_not_weights() -> None:
    own = layers()
    for name in ("norm.running_mean", "norm.running_var"):
        assert Ruler.of(own).farthest(own, moved(own, name, 1e6))[0] == 0.0


def test_without_a_scale_any_difference_is_too_far() -> None:
    own = {"a.weight": torch.zeros(2, 2)}
    ruler = Ruler.of(own)
    assert ruler.farthest(own, own)[0] == 0.0
    assert ruler.farthest(own, {"a.weight": torch.ones(2, 2)})[0] == math.inf
    assert math.isfinite(recordable(math.inf))
    assert recordable(math.nan) > 1


def test_regret_keeps_a_tenth_of_our_advantage() -> None:
    """L_j − L_i ≤ max(0.9·(ln C − L_i), 0.02·ln C)"""
    guessing = math.log(10)
    assert regret_max(0.3, guessing) == pytest.approx(0.9 * (guessing - 0.3))
    assert regret_max(guessing + 1, guessing) == pytest.approx(0.02 * guessing)


# On trained networks.


def judged(federation: Any, *sent: Tensors, **options: Any) -> list[Verdict]:
    site = federation.sites[0]
    own = Candidate(PeerName("us"), site.weights)
    peers = [Candidate(PeerName(f"peer-{index}"), tensors) for index, tensors in enumerate(sent)]
    rule = make_rule("lightyear", options)
    probe = Probe(site.model, site.batches)
    return list(rule.judge(own, peers, probe, Turn(Round(1), start=federation.start)).verdicts)


def corrupted(federation: Any, kind: str, seed: int = 0) -> Tensors:
    honest = federation.sites[1].weights
    head = [name for name in honest if name.endswith("weight")][-1].removesuffix(".weight")
    if kind == "bias-shift":
        shift = 5 * functional.one_hot(torch.tensor(3), 10)
        return {**honest, f"{head}.bias": honest[f"{head}.bias"] + shift}
    return corrupt(kind, honest, seed=seed, fresh=federation.build, head=head)


def test_honest_peers_are_accepted(digits: Any, normalised_digits: Any) -> None:
    for federation in (digits, normalised_digits):
        verdicts = judged(federation, *(site.weights for site in federation.sites[1:]))
        assert [verdict.reason for verdict in verdicts] == [Reason.OK] * 3
        for verdict in verdicts:
            checks = verdict.checks
            assert checks["distance"] <= checks["distance_max"]
            assert checks["agreement"] == verdict.score
            assert checks["regret"] <= checks["regret_max"]


@pytest.mark.parametrize("kind", ["sfa", "ana", "random", "head-flip", "head-scale", "bias-shift"])
def test_every_malfunction_is_too_far(digits: Any, kind: str) -> None:
    seeds = range(3 if kind in ("ana", "random") else 1)
    for verdict in judged(digits, *(corrupted(digits, kind, seed) for seed in seeds)):
        assert (verdict.accepted, verdict.reason) == (False, Reason.TOO_FAR)
        assert verdict.weight == 0.0
        assert verdict.score is not None  # the paper's score is there all the same
        assert decide(verdict.checks) is verdict.reason


@pytest.mark.parametrize("kind", ["head-flip", "head-scale", "bias-shift"])
def test_the_papers_test_alone_accepts_a_broken_head(digits: Any, kind: str) -> None:
    """Known weakness: the score does not depend on the head's own weights."""
    honest, broken = judged(digits, digits.sites[1].weights, corrupted(digits, kind), guard=False)
    assert broken.accepted
    assert broken.score == honest.score
    assert set(broken.checks) == {"agreement", "tau"}


def test_sign_flipping_a_batchnorm_network_breaks_its_domain(normalised_digits: Any) -> None:
    for guard in (True, False):
        (verdict,) = judged(normalised_digits, corrupted(normalised_digits, "sfa"), guard=guard)
        assert (verdict.reason, verdict.score) == (Reason.DOMAIN, None)
        assert not verdict.accepted


def test_weights_that_are_not_numbers(digits: Any) -> None:
    one = {name: tensor.clone() for name, tensor in digits.sites[1].weights.items()}
    one["7.weight"][0, 0] = math.inf  # in the head, which the score does not see
    for guard in (True, False):
        for verdict in judged(digits, corrupted(digits, "nan"), one, guard=guard):
            assert (verdict.reason, verdict.score) == (Reason.NONFINITE, None)


def test_finite_weights_whose_features_overflow(digits: Any) -> None:
    huge = {name: tensor * 1e25 for name, tensor in digits.sites[1].weights.items()}
    for guard in (True, False):
        (verdict,) = judged(digits, huge, guard=guard)
        assert (verdict.accepted, verdict.reason) == (False, Reason.NONFINITE)
        assert all(math.isfinite(value) for value in verdict.checks.values())


def test_training_on_wrong_labels_shows_as_regret(digits: Any) -> None:
    """Poisoned data: the features agree, but the answers are wrong."""
    site = digits.sites[1]
    model = digits.build()
    load_into(model, site.weights)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    x, y = (torch.cat(parts) for parts in zip(*site.batches, strict=True))
    for _ in range(350):
        optimizer.zero_grad()
        torch.autograd.backward(functional.cross_entropy(model(x), (y + 1) % 10))
        optimizer.step()
    (verdict,) = judged(digits, exchanged(model))
    assert verdict.checks["regret"] > verdict.checks["regret_max"]
    assert not verdict.accepted
    assert judged(digits, exchanged(model), guard=False)[0].accepted


def test_the_guard_needs_labels(digits: Any) -> None:
    site = digits.sites[0]
    probe = Probe(site.model, [x for x, _ in site.batches])
    own, peer = Candidate(PeerName("us"), site.weights), Candidate(PeerName("p"), site.weights)
    with pytest.raises(ValueError, match="labels"):
        make_rule("lightyear", {}).judge(own, [peer], probe, Turn(Round(0)))
    unguarded = make_rule("lightyear", {"guard": False})
    (verdict,) = unguarded.judge(own, [peer], probe, Turn(Round(0))).verdicts
    assert verdict.score == pytest.approx(1)
