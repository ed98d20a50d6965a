"""Sums and distances of tensors by name.

Running statistics of BatchNorm are no part of a step: a variance must not become negative, and the
guard ignores peers' statistics.  Results keep those of their base.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightyear_node.learning.batchnorm import is_statistic

Tensors = Mapping[str, Tensor]


def mean(updates: Sequence[Tensors]) -> dict[str, Tensor]:
    return {name: torch.stack([one[name] for one in updates]).mean(0) for name in updates[0]}


def deviation(updates: Sequence[Tensors]) -> dict[str, Tensor]:
    """Standard deviation of each entry; 0 for a single update."""
    return {
        name: torch.stack([one[name] for one in updates]).std(0, correction=0)
        for name in updates[0]
    }


def difference(left: Tensors, right: Tensors) -> dict[str, Tensor]:
    return {name: left[name] - right[name] for name in left}


def moved(base: Tensors, direction: Tensors, factor: float) -> dict[str, Tensor]:
    """base + factor · direction; statistics are those of `base`."""
    return {
        name: tensor.clone() if is_statistic(name) else tensor + factor * direction[name]
        for name, tensor in base.items()
    }


def flat(tensors: Tensors) -> Tensor:
    """All entries but statistics as one vector in double precision."""
    parts = [
        tensor.double().flatten() for name, tensor in tensors.items() if not is_statistic(name)
    ]
    return torch.cat(parts)


def norm(tensors: Tensors) -> float:
    """Norm of all entries but statistics."""
    squares = (
        float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2
        for name, tensor in tensors.items()
        if not is_statistic(name)
    )
    return math.sqrt(sum(squares))
