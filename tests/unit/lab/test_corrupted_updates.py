"""The paper's malfunctions, as formulas."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightyear_node.lab.corrupted_updates import corrupt
from lightyear_node.lab.malfunctions import Malfunction
from lightyear_node.learning import exchanged


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 9))


WEIGHTS = {name: torch.randn_like(t) for name, t in exchanged(network()).items()}


def test_additive_noise_attack_is_proportional_to_the_weights() -> None:
    """θ · (1 + (s/100) · N(0, 1)) elementwise, s = 120.5"""
    sent = corrupt("ana", WEIGHTS, seed=1)
    noise = sent["0.weight"] / WEIGHTS["0.weight"] - 1
    assert float(noise.std()) == pytest.approx(1.205, rel=0.05)
    assert abs(float(noise.mean())) < 0.1
    mild = corrupt("ana", WEIGHTS, seed=1, scale=1.5)["0.weight"] / WEIGHTS["0.weight"] - 1
    assert torch.allclose(mild * 120.5, noise * 1.5, atol=1e-3)


def test_additive_noise_attack_as_the_main_text_has_it() -> None:
    """'θ̃ = θ + ε, ε ∼ N(0, σ²I)'"""
    noise = corrupt("noise", WEIGHTS, seed=1, scale=0.3)["0.weight"] - WEIGHTS["0.weight"]
    assert float(noise.std()) == pytest.approx(0.3, rel=0.05)
    assert abs(float((noise * WEIGHTS["0.weight"]).mean())) < 0.03


def test_sign_flipping_attack() -> None:
    """'the client multiplies the entire update by a negative constant', θ̃ = −α·θ"""
    sent = corrupt("sfa", WEIGHTS, seed=1, scale=2.0)
    assert sent.keys() == WEIGHTS.keys()
    assert all(torch.equal(sent[name], -2 * tensor) for name, tensor in WEIGHTS.items())
    assert torch.equal(corrupt("sfa", WEIGHTS, seed=1)["0.bias"], -WEIGHTS["0.bias"])


@pytest.mark.parametrize("by_factory", [True, False])
def test_random_network_is_redrawn_each_round(by_factory: bool) -> None:
    """'the client submits a model update consisting of randomly initialized weights'"""
    fresh = network if by_factory else network()
    state = torch.get_rng_state()
    first, second = (corrupt("random", WEIGHTS, seed=1, round=r, fresh=fresh) for r in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first["0.weight"], second["0.weight"])
    assert not torch.equal(first["0.weight"], WEIGHTS["0.weight"])
    assert float(first["0.weight"].abs().max()) <= 40**-0.5  # as nn.Linear draws them
    assert torch.equal(first["1.running_var"], torch.ones(50))


def test_a_network_that_cannot_be_redrawn_is_named() -> None:
    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(3))

    with pytest.raises(ValueError, match="factory"):
        corrupt("random", {"0.token": torch.zeros(3)}, seed=1, fresh=nn.Sequential(Loose()))
    with pytest.raises(ValueError, match="fresh"):
        corrupt("random", WEIGHTS, seed=1)


def test_the_scale_of_dynamic_is_that_of_its_noise() -> None:
    """In the paper 1.5 % on Camelyon17; flipped signs keep their factor of −1."""

    def sent(scale: float | None, round: int) -> torch.Tensor:
        return corrupt(
            "dynamic", WEIGHTS, seed=5, round=round, scale=scale, fresh=network
        )["0.weight"]  # fmt: skip

    own, changed = WEIGHTS["0.weight"], []
    for round in range(20):
        mild, usual = sent(1.5, round), sent(None, round)
        if not torch.equal(mild, usual):
            changed.append(round)
            assert torch.allclose((mild - own) * 120.5, (usual - own) * 1.5, atol=1e-3)
    assert any(torch.equal(sent(1.5, round), -own) for round in range(20))
    assert 1 <= len(changed) <= 15


def test_dynamic_draws_one_of_the_three_each_round() -> None:
    kinds = []
    for r in range(30):
        sent = corrupt("dynamic", WEIGHTS, seed=5, round=r, fresh=network)
        if torch.equal(sent["0.weight"], -WEIGHTS["0.weight"]):
            kinds.append("sfa")
        elif torch.equal(sent["1.running_var"], torch.ones(50)):
            kinds.append("random")
        else:
            kinds.append("ana")
    assert min(kinds.count(kind) for kind in ("sfa", "random", "ana")) >= 4


def test_head_malfunctions_touch_the_head_alone() -> None:
    flipped = corrupt("head-flip", WEIGHTS, seed=1, head="3")
    scaled = corrupt("head-scale", WEIGHTS, seed=1, head="3")
    for name, tensor in WEIGHTS.items():
        head = name.startswith("3.")
        assert torch.equal(flipped[name], -tensor if head else tensor)
        assert torch.equal(scaled[name], 100 * tensor if head else tensor)
    with pytest.raises(ValueError, match="final layer"):
        corrupt("head-flip", WEIGHTS, seed=1, head="nowhere")


def test_nan() -> None:
    assert all(t.isnan().all() for t in corrupt("nan", WEIGHTS, seed=1).values())


def test_a_shifted_bias_prefers_one_class() -> None:
    sent = corrupt("bias-shift", WEIGHTS, seed=1, head="3")
    raised = sent["3.bias"] - WEIGHTS["3.bias"]
    assert sorted(raised.tolist())[-1] == pytest.approx(10)
    assert raised.count_nonzero() == 1
    assert all(torch.equal(sent[name], WEIGHTS[name]) for name in WEIGHTS if name != "3.bias")
    small = corrupt("bias-shift", WEIGHTS, seed=1, head="3", scale=1.0)
    assert float((small["3.bias"] - WEIGHTS["3.bias"]).max()) == pytest.approx(1)


MADE_BY_THE_WORKER = {Malfunction.LABEL_FLIP, Malfunction.STALE, Malfunction.FREE_RIDER}


@pytest.mark.parametrize("kind", sorted(MADE_BY_THE_WORKER))
def test_what_needs_more_than_the_weights_is_left_to_the_worker(kind: Malfunction) -> None:
    with pytest.raises(ValueError, match="the worker makes it"):
        corrupt(kind, WEIGHTS, seed=1)


@pytest.mark.parametrize("kind", sorted(set(Malfunction) - MADE_BY_THE_WORKER))
def test_the_same_seed_and_round_send_the_same_message(kind: Malfunction) -> None:
    before = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    first, second = (
        corrupt(kind, WEIGHTS, seed=3, round=2, fresh=network, head="3") for _ in range(2)
    )
    assert all(torch.allclose(first[n], second[n], rtol=0, atol=0, equal_nan=True) for n in first)
    assert all(torch.equal(before[name], tensor) for name, tensor in WEIGHTS.items())
    if kind is Malfunction.ANA:
        other = corrupt(kind, WEIGHTS, seed=4, round=2)
        assert not torch.equal(first["0.weight"], other["0.weight"])
