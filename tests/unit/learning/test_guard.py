"""The checks of the guard, individually and on trained networks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightyear_node.lab.corrupted_updates import corrupt
from lightyear_node.learning import Candidate, Validation, exchanged, load_into, make_rule
from lightyear_node.learning.chance import Chance
from lightyear_node.learning.guard import (
    ZERO_START_CEILING,
    DistanceLimits,
    decide,
    features_unformed,
    recordable,
    regret_max,
    soundness,
    tau_in_round,
)
from lightyear_node.learning.rules import RoundContext
from lightyear_node.types import PeerName, Reason, Round, Verdict

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
    """δ_l = ‖W_j − W_i‖_F / ‖W_i‖_F, of the layer closest to its limit"""
    own = layers()
    distances = DistanceLimits.of(own)
    theirs = moved(moved(own, "a.weight", 1.0), "b.weight", 1.2)
    assert distances.farthest(own, theirs).distance == pytest.approx(1.2 / 2)
    assert distances.farthest(own, own).distance == 0.0
    assert distances.farthest(own, {n: -t for n, t in own.items()}).distance == pytest.approx(2)


@pytest.mark.parametrize(
    ("step", "limit"), [(0.0, 0.5), (1.0, 0.5), (2.0, 0.75), (2.4, 0.9), (4.0, 1.0)]
)
def test_the_distance_limit_grows_with_our_own_step(step: float, limit: float) -> None:
    """κ_l = min(1, max(0.5, 1.5·s_l)), per layer"""
    own = layers()
    start = moved(own, "a.weight", step)  # s_a = step / 4
    limits = DistanceLimits.of(own, start).limits
    assert limits["a.weight"] == pytest.approx(limit)
    assert {limits[name] for name in limits if name != "a.weight"} == {0.5}


def test_rounds_alone_raise_the_distance_limit() -> None:
    own = layers()
    start = moved(own, "a.weight", 1.0)  # s_a = 1/4
    limits = [
        DistanceLimits.of(own, start, rounds_alone).limits["a.weight"] for rounds_alone in range(4)
    ]
    assert limits == pytest.approx([0.5, 0.75, 1.0, 1.0])


def test_noise_is_found_in_a_layer_that_hardly_moves() -> None:
    """A dense layer that moves by its own norm does not raise the limit of other layers."""
    own = layers()
    start = moved(own, "b.weight", 2.0)  # s_b = 1
    noisy = moved(moved(own, "a.weight", 2.4), "b.weight", 1.4)  # δ = 0.6 and 0.7
    found = DistanceLimits.of(own, start).farthest(own, noisy)
    assert (found.name, found.distance, found.limit) == ("a.weight", pytest.approx(0.6), 0.5)


@pytest.mark.parametrize(
    ("name", "scale"), [("a.bias", 4.0), ("b.bias", 2.0), ("norm.bias", 3.0), ("norm.weight", 3.0)]
)
def test_vectors_are_scaled_by_their_layer(name: str, scale: float) -> None:
    own = layers()
    distances = DistanceLimits.of(own, moved(own, name, 3.0) if name == "a.bias" else None)
    expected = 1.0 / max(scale, 12.0 if name == "a.bias" else 0.0)
    assert distances.farthest(own, moved(own, name, 1.0)).distance == pytest.approx(expected)
    assert distances.limits[name] == 0.5  # the step of a bias changes only its own scale


def test_a_large_bias_is_its_own_scale() -> None:
    own = moved(layers(), "a.bias", 10.0)
    assert DistanceLimits.of(own).farthest(
        own, moved(own, "a.bias", 5.0)
    ).distance == pytest.approx(0.5)


def test_biases_of_attention_and_reparametrised_layers_find_their_weight() -> None:
    own = {
        "mha.in_proj_weight": torch.full((4, 4), 1.0),
        "mha.in_proj_bias": torch.zeros(4),
        "mha.out_proj.weight": torch.full((2, 2), 100.0),
        "head.bias": torch.zeros(3),
        "head.parametrizations.weight.original0": torch.full((3, 1), 1e-3),
        "head.parametrizations.weight.original1": torch.full((3, 3), 2.0),
    }
    distances = DistanceLimits.of(own)
    assert distances.farthest(own, moved(own, "mha.in_proj_bias", 1.0)).distance == pytest.approx(
        1 / 4
    )
    assert distances.farthest(own, moved(own, "head.bias", 3.0)).distance == pytest.approx(3 / 6)


def test_a_tensor_that_starts_at_zero_is_scaled_by_our_own_step() -> None:
    """Position embeddings that start at zero: honest sites differ by more than their norm."""
    start = {"embed.position": torch.zeros(1, 64)}
    own = moved(start, "embed.position", 1.0)
    opposite = moved(start, "embed.position", -1.0)
    distances = DistanceLimits.of(own, start)
    assert distances.farthest(own, opposite).distance == pytest.approx(0.5)
    assert set(distances.limits.values()) == {0.5}


def test_running_statistics_are_not_weights() -> None:
    own = layers()
    for name in ("norm.running_mean", "norm.running_var"):
        assert DistanceLimits.of(own).farthest(own, moved(own, name, 1e6)).distance == 0.0


def test_without_a_scale_any_difference_is_too_far() -> None:
    own = {"a.weight": torch.zeros(2, 2)}
    distances = DistanceLimits.of(own)
    assert distances.farthest(own, own).distance == 0.0
    assert distances.farthest(own, {"a.weight": torch.ones(2, 2)}).distance == math.inf
    assert math.isfinite(recordable(math.inf))
    assert recordable(math.nan) > 1


def adapter() -> Tensors:
    """LoRA's A and B after a round: B has left zero, with norm 1; the norm of A is 2."""
    return {
        "layer.lora_A.default.weight": torch.full((2, 8), 0.5),
        "layer.lora_B.default.weight": torch.full((4, 2), 1 / math.sqrt(8)),
        "next.lora_A.default.weight": torch.full((2, 8), 5.0),
    }


B = "layer.lora_B.default.weight"


@pytest.mark.parametrize(
    ("step", "limit"),
    [
        (0.1, math.hypot(1, 2) / 2),  # half of the norm of A and B together
        (1.0, 1.5),  # our own step, and half of it
        (9.0, math.hypot(1, 2)),
    ],
)
def test_the_factor_that_starts_at_zero_is_scaled_by_its_pair(step: float, limit: float) -> None:
    own = adapter()
    start = moved(own, B, -step)
    usual = DistanceLimits.of(own, start)
    limits = DistanceLimits.of(own, start, zero_at_start=[B])
    assert limits.limits == usual.limits
    assert limits.extended == {B: pytest.approx(limit)}
    for share, reason in ((0.99, Reason.OK), (1.01, Reason.TOO_FAR)):
        found = limits.farthest(own, moved(own, B, share * limit))
        checks = {"distance": found.distance, "distance_max": found.limit}
        assert (decide(checks), found.name) == (reason, B)
        assert found.beyond is (reason is Reason.OK)
    assert not limits.farthest(own, moved(own, B, 0.49)).beyond
    assert usual.farthest(own, moved(own, B, 1.05)).limit <= 1.0


def test_a_peer_that_needs_an_extended_limit_has_stricter_limits_elsewhere() -> None:
    own = adapter()
    a = "layer.lora_A.default.weight"
    start = moved(moved(own, B, -1.0), a, -2.0)  # A has moved by its norm: κ = 1
    limits = DistanceLimits.of(own, start, zero_at_start=[B])
    noisy = moved(own, a, 2.0 * 0.8)
    assert limits.farthest(own, noisy).limit == 1.0
    found = limits.farthest(own, moved(noisy, B, 1.2))
    assert (found.name, found.limit) == (a, 0.7)
    assert found.distance == pytest.approx(0.8)


def test_rounds_alone_do_not_raise_an_extended_limit() -> None:
    own = adapter()
    start = moved(own, B, -1.0)
    limits = [DistanceLimits.of(own, start, alone, [B]).extended for alone in (0, 9)]
    assert limits[0] == limits[1]


def test_neighbouring_layers_are_no_pair() -> None:
    """Only a narrow matrix has a partner: the factor beside it, not the layer before it."""
    own = {
        "body.0.weight": torch.full((8, 8), 1.0),
        "body.1.weight": torch.full((8, 8), 0.01),
        "up.weight": torch.full((8, 2), 0.01),
        "down.weight": torch.full((2, 2), 1.0),
    }
    limits = DistanceLimits.of(own, None, zero_at_start=["body.1.weight", "up.weight"])
    norms = {name: float(own[name].norm()) for name in limits.extended}
    assert {name: limits.extended[name] * norms[name] for name in norms} == {
        name: pytest.approx(ZERO_START_CEILING * norms[name])
        for name in ("body.1.weight", "up.weight")
    }


@pytest.mark.parametrize(
    ("norm", "limit"),
    [(0.1, 1.75), (0.5, math.sqrt(12 / 3) / 2 / 0.5), (4.0, 0.5)],
)
def test_a_final_layer_that_starts_at_zero_is_scaled_by_usual_initial_values(
    norm: float, limit: float
) -> None:
    own = {"body.weight": torch.eye(8), "head.weight": torch.eye(12, 8) * norm / math.sqrt(8)}
    limits = DistanceLimits.of(own, None, zero_at_start=["head.weight"])
    assert limits.limits["head.weight"] == 0.5
    assert limits.extended == {"head.weight": pytest.approx(min(1.75, limit))}


def test_a_final_layer_that_is_exchanged_alone_has_its_usual_limit() -> None:
    own = {"head.weight": torch.eye(12, 8), "head.bias": torch.ones(12)}
    limits = DistanceLimits.of(own, None, zero_at_start=["head.weight", "head.bias"])
    assert limits.extended == {}


def test_a_token_may_be_as_far_as_its_scale_if_all_other_tensors_are_near() -> None:
    own = {"token": torch.ones(1, 1, 4), "body.weight": torch.eye(8)}
    limits = DistanceLimits.of(own)
    found = limits.farthest(own, moved(own, "token", 0.9 * 2.0))
    assert (found.name, found.beyond) == ("token", True)
    assert found.share < 1
    both = moved(moved(own, "token", 0.9 * 2.0), "body.weight", 0.8 * math.sqrt(8))
    assert limits.farthest(own, both).name == "body.weight"
    assert limits.farthest(own, both).share > 1


def test_features_are_formed_later_behind_a_final_layer_that_starts_at_zero() -> None:
    chance = Chance.of_classes(10)
    level = math.log(10)
    measured = Chance(level=1.0, unit=1.0, measured=True)
    assert features_unformed(1.01, measured)
    assert not features_unformed(0.99, measured)
    assert not features_unformed(level + 0.01, chance)  # class labels: distance is sufficient
    assert features_unformed(0.51 * level, chance, zero_final_layer=True)
    assert not features_unformed(0.49 * level, chance, zero_final_layer=True)
    assert tau_in_round(3, 0.6, unformed=True) == 0
    assert tau_in_round(3, 0.6) == 0.6


def test_an_untouched_zero_weight_has_no_scale() -> None:
    own = adapter() | {B: torch.zeros(4, 2)}
    limits = DistanceLimits.of(own, own, zero_at_start=[B])
    assert limits.farthest(own, moved(own, B, 1e-6)).distance == math.inf


def test_beyond_the_usual_distance_a_peer_must_keep_half_of_our_advantage() -> None:
    chance = Chance.of_classes(10)
    assert regret_max(0.3, chance, beyond=True) == pytest.approx(0.5 * (chance.level - 0.3))
    assert regret_max(9.0, chance, beyond=True) == regret_max(9.0, chance)


def test_the_regret_limit_is_nine_tenths_of_our_advantage() -> None:
    """L_j − L_i ≤ max(0.9·(ln C − L_i), 0.02·ln C)"""
    guessing, chance = math.log(10), Chance.of_classes(10)
    assert regret_max(0.3, chance) == pytest.approx(0.9 * (guessing - 0.3))
    assert regret_max(guessing + 1, chance) == pytest.approx(0.02 * guessing)


def test_the_regret_limit_of_a_measured_unit_is_positive_for_losses_of_any_sign() -> None:
    """L_j − L_i ≤ max(0.9·(level − L_i), 0.1·unit, L_i − level)"""
    chance = Chance(level=-0.5, unit=0.4, measured=True)
    assert regret_max(-0.9, chance) == pytest.approx(0.9 * 0.4)
    assert regret_max(-0.5, chance) == pytest.approx(0.1 * 0.4)
    assert regret_max(-0.2, chance) == pytest.approx(0.3)


# On trained networks.


def judged(federation: Any, *sent: Tensors, **options: Any) -> list[Verdict]:
    site = federation.sites[0]
    own = Candidate(PeerName("us"), site.weights)
    peers = [Candidate(PeerName(f"peer-{index}"), tensors) for index, tensors in enumerate(sent)]
    rule = make_rule("lightyear", options)
    validation = Validation(site.model, site.batches)
    return list(
        rule.judge(own, peers, validation, RoundContext(Round(1), start=federation.start)).verdicts
    )


def corrupted(federation: Any, kind: str, seed: int = 0) -> Tensors:
    honest = federation.sites[1].weights
    head = [name for name in honest if name.endswith("weight")][-1].removesuffix(".weight")
    if kind == "bias-shift":
        shift = 5 * functional.one_hot(torch.tensor(3), 10)
        return {**honest, f"{head}.bias": honest[f"{head}.bias"] + shift}
    return corrupt(kind, honest, seed=seed, fresh=federation.build, head=head)


def test_a_peer_that_is_too_far_gets_the_name_of_our_tensor(digits: Any) -> None:
    far, honest = judged(digits, corrupted(digits, "head-flip"), digits.sites[1].weights)
    assert (far.reason, far.details) == (Reason.TOO_FAR, {"tensor": "7.weight"})
    assert (honest.reason, honest.details) == (Reason.OK, {})


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
def test_every_malfunction_exceeds_the_distance_limit(digits: Any, kind: str) -> None:
    seeds = range(3 if kind in ("ana", "random") else 1)
    for verdict in judged(digits, *(corrupted(digits, kind, seed) for seed in seeds)):
        assert (verdict.accepted, verdict.reason) == (False, Reason.TOO_FAR)
        assert verdict.weight == 0.0
        assert verdict.score is not None  # the paper's score is still computed
        assert decide(verdict.checks) is verdict.reason


@pytest.mark.parametrize("kind", ["head-flip", "head-scale", "bias-shift"])
def test_the_papers_test_alone_accepts_a_broken_head(digits: Any, kind: str) -> None:
    """Known weakness: the score does not depend on the head's own weights."""
    honest, broken = judged(digits, digits.sites[1].weights, corrupted(digits, kind), guard=False)
    assert broken.accepted
    assert broken.score == honest.score
    assert set(broken.checks) == {"agreement", "tau"}


def test_a_sign_flipped_batchnorm_network_is_out_of_domain(normalised_digits: Any) -> None:
    for guard in (True, False):
        (verdict,) = judged(normalised_digits, corrupted(normalised_digits, "sfa"), guard=guard)
        assert (verdict.reason, verdict.score) == (Reason.DOMAIN, None)
        assert not verdict.accepted


def test_nonfinite_weights_have_no_score(digits: Any) -> None:
    infinite = {name: tensor.clone() for name, tensor in digits.sites[1].weights.items()}
    infinite["7.weight"][0, 0] = math.inf  # in the head, which the score does not depend on
    for guard in (True, False):
        for verdict in judged(digits, corrupted(digits, "nan"), infinite, guard=guard):
            assert (verdict.reason, verdict.score) == (Reason.NONFINITE, None)


def test_finite_weights_with_overflowing_features_are_nonfinite(digits: Any) -> None:
    huge = {name: tensor * 1e25 for name, tensor in digits.sites[1].weights.items()}
    for guard in (True, False):
        (verdict,) = judged(digits, huge, guard=guard)
        assert (verdict.accepted, verdict.reason) == (False, Reason.NONFINITE)
        assert all(math.isfinite(value) for value in verdict.checks.values())


def test_training_on_wrong_labels_exceeds_the_regret_limit(digits: Any) -> None:
    """Poisoned data: the features agree, but the predictions are wrong."""
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
    validation = Validation(site.model, [x for x, _ in site.batches])
    own, peer = Candidate(PeerName("us"), site.weights), Candidate(PeerName("p"), site.weights)
    with pytest.raises(ValueError, match="labels"):
        make_rule("lightyear", {}).judge(own, [peer], validation, RoundContext(Round(0)))
    unguarded = make_rule("lightyear", {"guard": False})
    (verdict,) = unguarded.judge(own, [peer], validation, RoundContext(Round(0))).verdicts
    assert verdict.score == pytest.approx(1)
