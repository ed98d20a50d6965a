"""Attacks made of means and deviations of the updates that the adversary sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import NormalDist

import torch
from torch import Tensor

from lightyear_node.lab.attacks.colluding import all_updates, colluders_updates
from lightyear_node.lab.attacks.option_values import number, one_of, positive
from lightyear_node.lab.attacks.weights_math import (
    Tensors,
    deviation,
    difference,
    flat,
    mean,
    moved,
    norm,
)
from lightyear_node.lab.malfunction_plugins import AttackContext

DIRECTIONS = ("std", "sign", "unit")
HALVINGS = 60


def alie(update: Tensors, context: AttackContext, z: float | None = None) -> dict[str, Tensor]:
    """A little is enough: mean − z · deviation of the colluders' honest updates.

    A single attacker has no deviation and takes that of all updates it sees.  By default z is the
    authors' value for a majority vote, or 1 where that is not above 0.
    """
    strength = default_z(context) if z is None else number("z", z)
    ours = colluders_updates(update, context)
    seen = ours if len(ours) > 1 else all_updates(update, context)
    return moved(mean(seen), deviation(seen), -strength)


def default_z(context: AttackContext) -> float:
    """The largest z at which a majority of all sites is expected to be farther from the mean."""
    bad = len(context.colluders) + 1
    sites = bad + len(context.honest)
    supporters = sites // 2 + 1 - bad
    share = (sites - bad - supporters) / (sites - bad) if sites > bad else 1.0
    return NormalDist().inv_cdf(share) if 0.5 < share < 1 else 1.0


def ipm(update: Tensors, context: AttackContext, epsilon: float = 0.1) -> dict[str, Tensor]:
    """Inner-product manipulation: a step against the mean step of the honest sites.

    Messages of colluders differ as far as their models at the start of the round do.
    """
    factor = positive("epsilon", epsilon)
    honest = list(context.honest.values()) or [update]
    step = difference(mean(honest), context.start)
    return moved(context.start, step, -factor)


def min_max(update: Tensors, context: AttackContext, direction: str = "std") -> dict[str, Tensor]:
    """The farthest point whose largest distance to an update is no larger than among updates."""

    def fits(squares: Tensor, among: Tensor) -> bool:
        return bool(squares.max() <= among.max())

    return _farthest(update, context, direction, fits)


def min_sum(update: Tensors, context: AttackContext, direction: str = "std") -> dict[str, Tensor]:
    """The same for the sum of squared distances."""

    def fits(squares: Tensor, among: Tensor) -> bool:
        return bool(squares.sum() <= among.sum(1).max())

    return _farthest(update, context, direction, fits)


def _farthest(
    update: Tensors,
    context: AttackContext,
    direction: str,
    fits: Callable[[Tensor, Tensor], bool],
) -> dict[str, Tensor]:
    """mean + s · direction with the largest s for which the squared distances fit.

    With the direction `std` all colluders send the same; `sign` and `unit` are relative to the
    model with which a site began.
    """
    updates = all_updates(update, context)
    centre = mean(updates)
    away = _direction(one_of("direction", direction, DIRECTIONS), updates, centre, context)
    if norm(away) == 0:
        return centre
    points = torch.stack([flat(one) for one in updates])
    among = torch.cdist(points, points).square()  # (n, n)
    middle, along = flat(centre), flat(away)

    def inside(scale: float) -> bool:
        return fits((points - middle - scale * along).square().sum(1), among)

    return moved(centre, away, largest_scale(inside))


def largest_scale(inside: Callable[[float], bool]) -> float:
    """The largest scale inside, by bisection; 0 is inside, and large scales are not."""
    low, high = 0.0, 1.0
    while inside(high):
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) else (low, middle)
    return low


def _direction(
    kind: str, updates: Sequence[Tensors], centre: Tensors, context: AttackContext
) -> dict[str, Tensor]:
    if kind == "std":
        return {name: -tensor for name, tensor in deviation(updates).items()}
    step = difference(centre, context.start)
    if kind == "sign":
        return {name: -tensor.sign() for name, tensor in step.items()}
    size = norm(step)
    return {name: -tensor / size if size else tensor for name, tensor in step.items()}
