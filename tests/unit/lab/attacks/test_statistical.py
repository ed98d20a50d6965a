"""Attacks from means and deviations, against values computed by hand."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor

from lightyear_node.lab.attacks.statistical import (
    alie,
    default_z,
    ipm,
    largest_scale,
    min_max,
    min_sum,
)
from tests.support.recorded_attacks import A, B, C, D, context_of

OWN = {"w": torch.tensor([1.0, 2.0]), "n.running_var": torch.tensor([1.0])}


def like(*values: float, variance: float = 1.0) -> dict[str, Tensor]:
    return {"w": torch.tensor(values), "n.running_var": torch.tensor([variance])}


def test_alie_is_the_mean_minus_z_deviations_of_the_colluders() -> None:
    context = context_of(
        OWN, colluders={D: like(3.0, 2.0, variance=3.0)}, honest={A: like(9.0, 9.0)}
    )
    sent = alie(OWN, context, z=2.0)
    torch.testing.assert_close(sent["w"], torch.tensor([0.0, 2.0]))
    # Statistics are the mean: a variance must not become negative.
    torch.testing.assert_close(sent["n.running_var"], torch.tensor([2.0]))


def test_a_single_attacker_uses_the_deviation_of_all_updates() -> None:
    sent = alie(OWN, context_of(OWN, honest={A: like(3.0, 2.0)}), z=1.0)
    torch.testing.assert_close(sent["w"], torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize(
    ("bad", "good", "z"),
    [
        (2, 3, NormalDist().inv_cdf(2 / 3)),
        (12, 38, NormalDist().inv_cdf(24 / 38)),
        (4, 1, 1.0),
        (1, 0, 1.0),
    ],
)
def test_the_default_z_is_the_authors_or_1_for_a_majority(bad: int, good: int, z: float) -> None:
    context = context_of(
        OWN,
        colluders={f"bad-{index}": OWN for index in range(bad - 1)},
        honest={f"good-{index}": OWN for index in range(good)},
    )
    assert default_z(context) == pytest.approx(z)


def test_ipm_steps_against_the_mean_honest_step() -> None:
    start = like(0.0, 1.0)
    context = context_of(OWN, start=start, honest={A: like(2.0, 1.0), C: like(4.0, 3.0)})
    torch.testing.assert_close(ipm(OWN, context, epsilon=0.5)["w"], torch.tensor([-1.5, 0.5]))
    assert torch.equal(ipm(OWN, context)["n.running_var"], start["n.running_var"])


SQUARE: dict[str, Any] = {
    "colluders": {D: like(-1.0, 0.0)},
    "honest": {A: like(0.0, 1.0), C: like(0.0, -1.0)},
}
"""With an own update at (1, 0): four corners around (0, 0), at most 2 apart."""


@pytest.mark.parametrize("direction", ["std", "sign", "unit"])
def test_min_max_goes_as_far_as_the_farthest_update(direction: str) -> None:
    own = like(1.0, 0.0)
    sent = min_max(own, context_of(own, start=like(-1.0, -1.0), **SQUARE), direction)["w"]
    # On the diagonal at (−s, −s), the farthest corner is 2 away: (1 + s)² + s² = 4.
    torch.testing.assert_close(sent, torch.tensor([-0.822876, -0.822876]))


def test_min_sum_keeps_the_sum_of_squared_distances() -> None:
    own = like(1.0, 0.0)
    sent = min_sum(own, context_of(own, start=like(-1.0, -1.0), **SQUARE))["w"]
    # Each corner has a sum of 2 + 2 + 4 = 8; the sum at (−s, −s) is 4 + 4 · 2 s².
    torch.testing.assert_close(sent, torch.full((2,), -(0.5**0.5)))


def test_equal_updates_leave_no_room() -> None:
    context = context_of(OWN, honest={A: OWN})
    assert torch.equal(min_max(OWN, context)["w"], OWN["w"])
    assert torch.equal(min_sum(OWN, context, "unit")["w"], OWN["w"])


def test_bisection_finds_the_largest_scale() -> None:
    assert largest_scale(lambda scale: scale <= 12.5) == pytest.approx(12.5)
    assert largest_scale(lambda scale: scale <= 1e-3) == pytest.approx(1e-3)


def test_colluders_by_other_names_compute_the_same() -> None:
    other = like(3.0, 5.0)
    by_b = alie(OWN, context_of(OWN, site=B, colluders={D: other}))
    by_d = alie(other, context_of(other, site=D, colluders={B: OWN}))
    assert torch.equal(by_b["w"], by_d["w"])
