"""Checks what the agreement score does not see; the first check that fails is the reason.

    0. sound       every entry finite, no variance below zero             nonfinite, domain
    1. distance    δ_l ≤ κ_l in every layer l                             too_far
    2. agreement   A(θ_i, θ_j; V_i) ≥ τ, once features have formed         agreement_below_tau
    3. regret      L_j − L_i ≤ max(0.9 (c − L_i), 0.02 u) on V_i           loss_regret

For class labels, the loss of guessing c and the unit u are ln C.  For other losses both are
measured (`chance`), the floor is 0.1 u, and a site whose own loss is above c allows a peer as much
again: such losses may start far above c (targets in the thousands), and honest sites approach it
at different speeds.

Checks 0 and 1 read a file tensor by tensor, before any forward pass.  Check 1 needs the common
start that all sites derive from the federation's seed, but no honest majority.  Not detected:
manipulated data that trains well, BatchNorm statistics (never used for that reason: `batchnorm`),
small steps within the limit, and noise on a final layer that starts at exactly zero (no scale to
compare with in the first round).

The functions are pure.  A verdict's reason follows from its recorded numbers alone (`decide`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightyear_node.learning.batchnorm import is_statistic
from lightyear_node.learning.chance import Chance
from lightyear_node.learning.weights import other_names, release
from lightyear_node.types import Reason

DISTANCE_FLOOR = 0.5
DISTANCE_CEILING = 1.0
"""At 1, a peer's layer is as far from ours as a zero matrix."""
ZERO_START_CEILING = 1.75
"""Of weights that start at zero: two steps of one length in unrelated directions differ by 1.4."""
STEPS_ALLOWED = 1.5
"""A peer may be this many of our own steps of this round away."""
VECTOR_STEPS = 4.0
"""For biases and other vectors: two opposite steps like our own give a distance of at most 1/2."""
OTHERS_BEYOND = 0.7
"""Largest κ of the other tensors, if a tensor needs its extended limit."""
FORMED_SHARE = 0.5
"""In units of ln C: what a model with a final layer that starts at zero learns without check 2."""
REGRET_SHARE = 0.9
"""On our data a peer must keep at least a tenth of our advantage over guessing."""
REGRET_SHARE_BEYOND = 0.5
"""The same for a peer whose distance is only within an extended limit (`DistanceLimits`)."""
REGRET_FLOOR = 0.02
"""In units of ln C: the slack while our own model is no better than guessing."""
MEASURED_FLOOR = 0.1
"""In measured units: as much as the merge check allows by default."""


@dataclass(frozen=True, slots=True)
class _Check:
    value: str
    limit: str
    at_most: bool
    reason: Reason

    def fails(self, checks: Mapping[str, float]) -> bool:
        if self.value not in checks:
            return False  # this rule does not make the check
        value, limit = checks[self.value], checks[self.limit]
        return not (value <= limit if self.at_most else value >= limit)  # NaN fails


ORDER = (
    _Check("distance", "distance_max", True, Reason.TOO_FAR),
    _Check("agreement", "tau", False, Reason.AGREEMENT_BELOW_TAU),
    _Check("regret", "regret_max", True, Reason.LOSS_REGRET),
)


def decide(checks: Mapping[str, float]) -> Reason:
    """Reason of the first check that fails; checks without recorded values are skipped."""
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
        release(tensors, name)
    return Reason.OK


@dataclass(frozen=True, slots=True)
class Farthest:
    """The tensor of a peer's model that is closest to its limit, or farthest beyond it."""

    name: str
    """In our own layout; empty if nothing is compared."""
    distance: float
    limit: float
    beyond: bool = False
    """Whether a tensor needs its extended limit."""

    @property
    def share(self) -> float:
        return self.distance / self.limit


@dataclass(frozen=True, slots=True)
class DistanceLimits:
    """Limits of check 1: each tensor's scale, and how far a peer's may be from ours.

        δ_l = ‖W_j − W_i‖ / ‖W_i‖  ≤  κ_l = min(1, max(0.5, 1.5 s_l m)),
        s_l = ‖W_i − W_i^start‖ / ‖W_i‖,   m = rounds since our last merge

    for every weight of two or more dimensions.  Each layer has its own limit, because in the first
    rounds dense layers move by their own norm while the first convolutions hardly move: a common
    limit would accept noise there.  A site that did not merge for some rounds (it rejected all, or
    was disconnected) is as many steps away from the others; without m it could never merge again.

    Biases, scales of normalization layers and other vectors are measured against their layer: a
    bias is one more column of the layer's weight matrix, so its scale is the larger of ‖b_i‖ and
    ‖W_i‖, or a multiple of our own step, for vectors that start at zero.  A tied weight counts for
    every layer that has it.  Running statistics are not checked.

    A weight that is zero in the common start has no scale at first, and its limit is extended.  Of
    a low-rank adapter B A, the norm of both factors takes the place of ‖W_i‖ in κ_l, without m.
    For other weights, such as a new final layer, κ_l = min(1.75, ‖W_usual‖ / (2 ‖W_i‖)), with the
    norm of PyTorch's usual initial values; not if all exchanged weights start at zero.  Vectors
    that belong to no layer, such as tokens and position embeddings, are extended to κ_l = 1.  A
    peer that needs an extended limit has stricter ones for everything else: κ_l ≤ 0.7 for all other
    tensors, where corruptions of the whole model are found, and in check 3.
    """

    scales: Mapping[str, float]
    limits: Mapping[str, float]
    extended: Mapping[str, float] = field(default_factory=dict)
    """Limits of tensors without a scale of their own; others have none."""

    @classmethod
    def of(
        cls,
        own: Mapping[str, Tensor],
        start: Mapping[str, Tensor] | None = None,
        rounds_alone: int = 0,
        zero_at_start: Collection[str] = (),
    ) -> DistanceLimits:
        """`start` is our model before this round's training, if known."""
        norms = {name: _norm(own[name]) for name in own if not is_statistic(name)}
        tied = other_names(own)
        weights = norms | {other: norms[tied[other]] for other in tied if tied[other] in norms}
        scales, limits, extended = {}, {}, {}
        for name, norm in norms.items():
            step = _distance(own, start, name) if start else 0.0
            if _is_weight(name, own[name]):
                reach = STEPS_ALLOWED * _over(step, norm) * (1 + rounds_alone)
                scales[name] = norm
                limits[name] = min(DISTANCE_CEILING, max(DISTANCE_FLOOR, reach))
                if name in zero_at_start and norm:
                    reach = _extended_limit(name, step, own, norms, zero_at_start)
                    if reach > 0:
                        extended[name] = max(limits[name], reach)
            else:
                layer = [weights[other] for other in weights if _is_weight_beside(other, name)]
                scales[name] = max(norm, *layer, VECTOR_STEPS * step * (1 + rounds_alone), 0.0)
                limits[name] = DISTANCE_FLOOR
                if not layer:
                    extended[name] = DISTANCE_CEILING
        return cls(scales, limits, extended)

    def farthest(self, own: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Farthest:
        """The tensor with the largest δ_l / κ_l."""
        distances = {
            name: _over(_distance(own, theirs, name), scale) for name, scale in self.scales.items()
        }
        beyond = any(
            self.limits[name] < distances[name] <= limit for name, limit in self.extended.items()
        )
        limits = {**self.limits, **self.extended}
        if beyond:
            others = limits.keys() - self.extended.keys()
            limits |= {name: min(limits[name], OTHERS_BEYOND) for name in others}
        tensors = [
            Farthest(name, distance, limits[name], beyond) for name, distance in distances.items()
        ]
        none = Farthest("", 0.0, DISTANCE_FLOOR)
        return max(tensors, key=lambda one: one.share, default=none)


def _extended_limit(
    name: str,
    step: float,
    own: Mapping[str, Tensor],
    norms: Mapping[str, float],
    zero_at_start: Collection[str],
) -> float:
    """κ of a weight that was zero in the common start; 0 if it is not extended."""
    norm = norms[name]
    partner = _partner_norm(name, own, norms)
    if partner:
        pair = math.hypot(norm, partner)
        allowed = max(DISTANCE_FLOOR * pair, STEPS_ALLOWED * step)
        return min(DISTANCE_CEILING * pair, allowed) / norm
    if not any(_is_weight(other, own[other]) for other in norms.keys() - set(zero_at_start)):
        return 0.0  # noise on the whole model would show in no other weight
    # PyTorch draws initial values from ±1/√n, with n values per row: a variance of 1/(3 n).
    usual = math.sqrt(len(own[name]) / 3)
    return min(ZERO_START_CEILING, DISTANCE_FLOOR * usual / norm)


def _partner_norm(name: str, own: Mapping[str, Tensor], norms: Mapping[str, float]) -> float:
    """Norm of the other factor of a low-rank adapter (LoRA's A, if this is B); 0 without one.

    Its name differs in one part, and its rows are as many as our columns: fewer than the rest.
    """
    parts, shape = name.split("."), own[name].shape
    if len(shape) != 2 or shape[1] >= shape[0]:
        return 0.0
    for other, norm in norms.items():
        theirs = other.split(".")
        if len(theirs) != len(parts) or own[other].ndim != 2:
            continue
        differing = [pair for pair in zip(parts, theirs, strict=True) if pair[0] != pair[1]]
        rows, columns = own[other].shape
        if len(differing) == 1 and rows == shape[1] < columns and not theirs[-1].isdigit():
            return norm
    return 0.0


def tau_in_round(round: int, tau: float, *, unformed: bool = False, lowest: float = 0.0) -> float:
    """Limit of check 2: none in the first round, and none while features are `unformed`.

    After one round of training, features of honest sites may agree no more than by chance.  A site
    rejected then would diverge and stay too far from the others.  All sites have just left the same
    start, so the distance is sufficient.  `lowest` is the smallest score that exists.
    """
    return lowest if round == 0 or unformed else tau


def features_unformed(own_loss: float, chance: Chance, *, zero_final_layer: bool = False) -> bool:
    """Whether our own model has learned too little for its features to be compared.

    In general less than a constant, as with targets in the thousands, whose mean is learned first.
    A final layer that starts at zero passes no gradient on until it has grown, so features form
    later: not before half of the advantage over guessing is reached.
    """
    if zero_final_layer:
        return own_loss > chance.level - FORMED_SHARE * chance.unit
    return chance.shortfall(own_loss) > 0


def regret_max(own_loss: float, chance: Chance, *, beyond: bool = False) -> float:
    """Limit of check 3, from L_i and the loss of guessing; stricter `beyond` the usual distance."""
    return max(
        (REGRET_SHARE_BEYOND if beyond else REGRET_SHARE) * (chance.level - own_loss),
        (MEASURED_FLOOR if chance.measured else REGRET_FLOOR) * chance.unit,
        chance.shortfall(own_loss),
    )


def recordable(value: float) -> float:
    """The largest float in place of infinity and NaN, which JSON does not have."""
    return value if math.isfinite(value) else sys.float_info.max


def _is_weight(name: str, tensor: Tensor) -> bool:
    return tensor.ndim >= 2 and "weight" in _within_layer(name)


def _is_weight_beside(name: str, other: str) -> bool:
    return _layer(name) == _layer(other) and "weight" in _within_layer(name)


def _layer(name: str) -> str:
    return name.removesuffix(_within_layer(name))


def _within_layer(name: str) -> str:
    """The part of a tensor's name after its layer's, such as `weight` or `in_proj_bias`."""
    _, mark, rest = name.rpartition(".parametrizations.")
    return f"parametrizations.{rest}" if mark else name.rpartition(".")[2]


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor], name: str) -> float:
    wide = torch.promote_types(left[name].dtype, torch.float32)
    distance = _norm(left[name].to(wide) - right[name].to(wide))
    release(left, name)
    release(right, name)
    return distance


def _over(distance: float, scale: float) -> float:
    if distance == 0:
        return 0.0
    return distance / scale if scale > 0 else math.inf
