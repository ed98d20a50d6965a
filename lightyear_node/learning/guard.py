"""Seeing what the agreement score cannot: small checks in a fixed order, the first failure named.

    0. sound       every entry finite, no variance below zero             nonfinite, domain
    1. distance    δ_l ≤ κ_l in every layer l                             too_far
    2. agreement   A(θ_i, θ_j; V_i) ≥ τ, from the second round on          agreement_below_tau
    3. regret      L_j − L_i ≤ max(0.9 (ln C − L_i), 0.02 ln C) on V_i     loss_regret

Checks 0 and 1 read a file tensor by tensor, before any forward pass.  Check 1 needs the common
start that all sites derive from the federation's seed, and no majority of honest peers.  Blind to:
poisoned data that trains well, BatchNorm statistics (which are therefore never used: `statistics`),
small steps inside the ball, and weights that start at exactly zero (no scale to compare with).

The functions are pure.  A verdict's reason follows from its recorded numbers alone (`decide`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightyear_node.learning.statistics import is_statistic
from lightyear_node.learning.weights import let_go, tied_in
from lightyear_node.records import Reason

DISTANCE_FLOOR = 0.5
DISTANCE_CEILING = 1.0
"""At 1, a peer's layer is as far from ours as the zero matrix is."""
STEPS_ALLOWED = 1.5
"""A peer may be somewhat farther away than our own step of this round took us."""
VECTOR_STEPS = 4.0
"""Of a bias or loose tensor: two opposite steps like our own make a distance of at most 1/2."""
REGRET_SHARE = 0.9
"""On our data a peer must keep at least a tenth of our advantage over guessing."""
REGRET_FLOOR = 0.02
"""In units of ln C: the slack where we are no better than guessing ourselves."""


@dataclass(frozen=True, slots=True)
class _Check:
    value: str
    limit: str
    at_most: bool
    reason: Reason

    def fails(self, checks: Mapping[str, float]) -> bool:
        if self.value not in checks:
            return False  # not part of this rule's tests
        value, limit = checks[self.value], checks[self.limit]
        return not (value <= limit if self.at_most else value >= limit)  # NaN fails


ORDER = (
    _Check("distance", "distance_max", True, Reason.TOO_FAR),
    _Check("agreement", "tau", False, Reason.AGREEMENT_BELOW_TAU),
    _Check("regret", "regret_max", True, Reason.LOSS_REGRET),
)


def decide(checks: Mapping[str, float]) -> Reason:
    """The first check that fails names the reason; a check that was not made cannot fail."""
    return next((check.reason for check in ORDER if check.fails(checks)), Reason.OK)


def soundness(tensors: Mapping[str, Tensor]) -> Reason:
    """Check 0.  OK, NONFINITE or DOMAIN."""
    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        low, high = torch.aminmax(tensor)  # both are NaN if any entry is
        if not (torch.isfinite(low) and torch.isfinite(high)):
            return Reason.NONFINITE
        if name.endswith("running_var") and low < 0:
            return Reason.DOMAIN
        let_go(tensors, name)
    return Reason.OK


@dataclass(frozen=True, slots=True)
class Ruler:
    """Check 1, our side of it: each tensor's scale, and how far a peer's may be from ours.

        δ_l = ‖W_j − W_i‖ / ‖W_i‖  ≤  κ_l = min(1, max(0.5, 1.5 s_l m)),
        s_l = ‖W_i − W_i^start‖ / ‖W_i‖,   m = rounds since we last merged with anybody

    for every weight of two or more dimensions.  Layer by layer, because in the first rounds the
    dense layers move by their own length while the first convolutions hardly move: a limit common
    to all would let noise pass there.  A site that was alone for some rounds (it rejected all, or
    was cut off) has gone as many steps away from the others; without m it would never come back.

    Biases, scales of normalisation layers and other loose tensors are measured against the layer
    they belong to: a bias is one more column of its layer's weight matrix, so its scale is the
    larger of ‖b_i‖ and ‖W_i‖; besides, it may differ by some of our own steps, for those that begin
    at zero.  A tied weight is beside the biases of every layer that has it.  Running statistics are
    left out.
    """

    scales: Mapping[str, float]
    limits: Mapping[str, float]

    @classmethod
    def of(
        cls,
        own: Mapping[str, Tensor],
        start: Mapping[str, Tensor] | None = None,
        rounds_alone: int = 0,
    ) -> Ruler:
        """`start` is our own model as it was before this round's training, where it is known."""
        norms = {name: _norm(own[name]) for name in own if not is_statistic(name)}
        tied = tied_in(own)
        weights = norms | {other: norms[tied[other]] for other in tied if tied[other] in norms}
        scales, limits = {}, {}
        for name, norm in norms.items():
            step = _distance(own, start, name) if start else 0.0
            if _is_weight(name, own[name]):
                reach = STEPS_ALLOWED * _over(step, norm) * (1 + rounds_alone)
                scales[name] = norm
                limits[name] = min(DISTANCE_CEILING, max(DISTANCE_FLOOR, reach))
            else:
                layer = [weights[other] for other in weights if _is_weight_beside(other, name)]
                scales[name] = max(norm, *layer, VECTOR_STEPS * step * (1 + rounds_alone), 0.0)
                limits[name] = DISTANCE_FLOOR
        return cls(scales, limits)

    def farthest(
        self, own: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
    ) -> tuple[float, float]:
        """(δ_l, κ_l) of the tensor that is nearest to its limit, or farthest beyond it."""
        distances = [
            (_over(_distance(own, theirs, name), scale), self.limits[name])
            for name, scale in self.scales.items()
        ]
        return max(distances, key=lambda pair: pair[0] / pair[1], default=(0.0, DISTANCE_FLOOR))


def first_tau(round: int, tau: float) -> float:
    """Check 2's limit: in the first round there is none.

    After one stretch of training the features are hardly formed, and those of honest sites may
    agree as little as chance; a site that nobody accepts then goes its own way, and is too far from
    the others ever after.  All sites have just left the same start, so distance says enough.
    """
    return 0.0 if round == 0 else tau


def regret_max(own_loss: float, chance_loss: float) -> float:
    """Check 3's limit, from L_i and ln C."""
    return max(REGRET_SHARE * (chance_loss - own_loss), REGRET_FLOOR * chance_loss)


def recordable(value: float) -> float:
    """JSON knows neither infinity nor NaN; both stand for "as bad as can be" here."""
    return value if math.isfinite(value) else sys.float_info.max


def _is_weight(name: str, tensor: Tensor) -> bool:
    return tensor.ndim >= 2 and "weight" in _within_layer(name)


def _is_weight_beside(name: str, other: str) -> bool:
    return _layer(name) == _layer(other) and "weight" in _within_layer(name)


def _layer(name: str) -> str:
    return name.removesuffix(_within_layer(name))


def _within_layer(name: str) -> str:
    """The part of a tensor's name that its layer gives it, as in `weight` or `in_proj_bias`."""
    _, mark, rest = name.rpartition(".parametrizations.")
    return f"parametrizations.{rest}" if mark else name.rpartition(".")[2]


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor], name: str) -> float:
    wide = torch.promote_types(left[name].dtype, torch.float32)
    distance = _norm(left[name].to(wide) - right[name].to(wide))
    let_go(left, name)
    let_go(right, name)
    return distance


def _over(distance: float, scale: float) -> float:
    if distance == 0:
        return 0.0
    return distance / scale if scale > 0 else math.inf
