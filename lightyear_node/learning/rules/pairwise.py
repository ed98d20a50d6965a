"""Distances and cosines between models, from their Gram matrix.

    G_ab = ⟨x_a, x_b⟩,   x_a = θ_a or θ_a − θ_reference, all exchanged tensors as one vector

    ‖x_a − x_b‖² = G_aa + G_bb − 2 G_ab,   cos(x_a, x_b) = G_ab / √(G_aa G_bb)

Summed in double precision, tensor by tensor and in blocks, so that at most one tensor of each model
is in memory.  For distances, give a reference near the models: without it, the distance of two
similar models would be lost in the rounding errors of their norms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightyear_node.learning.weights import layout_of, release

Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]

BLOCK_BYTES = 8 << 20
"""Memory for one block of all models, in double precision."""
ROUNDING = 1e-12
"""Cosines that differ by less count as equal: the error of a long sum in double precision."""


def gram(
    models: Sequence[Mapping[str, Tensor]], reference: Mapping[str, Tensor] | None = None
) -> Matrix:
    """G, (n, n), in the order given, which must not depend on the order of arrival."""
    total = torch.zeros(len(models), len(models), dtype=torch.float64)
    for name in layout_of(models[0]).entries:
        total += _gram_of_tensor(name, models, reference)
        for tensors in models if reference is None else (*models, reference):
            release(tensors, name)
    upper = np.triu(total.numpy())
    return np.asarray(upper + np.triu(upper, 1).T)  # exactly symmetric, so that ties stay ties


def _gram_of_tensor(
    name: str, models: Sequence[Mapping[str, Tensor]], reference: Mapping[str, Tensor] | None
) -> Tensor:
    flat = [tensors[name].detach().reshape(-1) for tensors in models]
    origin = None if reference is None else reference[name].detach().reshape(-1)
    entries = flat[0].numel()
    step = min(max(1, BLOCK_BYTES // (8 * len(flat))), max(1, entries))
    rows = torch.empty(len(flat), step, dtype=torch.float64)  # (n, block)
    total = torch.zeros(len(flat), len(flat), dtype=torch.float64)
    for begin in range(0, entries, step):
        block = rows[:, : min(step, entries - begin)]
        for row, tensor in zip(block, flat, strict=True):
            row.copy_(tensor[begin : begin + step])
        if origin is not None:
            block -= origin[begin : begin + step].to(block)
        total += block @ block.T
    return total


def squared_distances(products: Matrix) -> Matrix:
    """(n, n), zero on the diagonal."""
    squares = np.diag(products)
    return np.asarray(np.maximum(squares[:, None] + squares[None, :] - 2 * products, 0.0))


def norms(products: Matrix) -> Vector:
    """(n,)"""
    return np.asarray(np.sqrt(np.diag(products)))


def cosines(products: Matrix) -> Matrix:
    """(n, n); the cosine of a zero vector to any other is 0."""
    lengths = norms(products)
    return divided(products, lengths[:, None] * lengths[None, :])


def divided(products: NDArray[np.float64], lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cosines from inner products and products of lengths."""
    quotient = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
    return np.asarray(np.clip(quotient, -1.0, 1.0))
