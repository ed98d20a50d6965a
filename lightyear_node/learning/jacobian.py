"""The kernel by its definition, for heads without a closed form and for the closed form's tests.

K_ab = (1/C) ⟨J_θ(x_a), J_θ(x_b)⟩,   J_θ(x) = ∂h(θ;x)/∂θ^(L)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from lightyear_node.learning.forward import (
    OnLogits,
    at_rest,
    batch_rows,
    device_of,
    logits_of,
    to_device,
    unpack,
)
from lightyear_node.learning.heads import Head, head_parameters

JACOBIAN_ENTRIES_MAX = 1 << 25
"""Entries of J held at once (256 MiB in double precision); more outputs mean more passes."""
VJP_ENTRIES_MAX = 1 << 24
"""Entries of one batched backward pass."""


def jacobian_kernel(
    model: nn.Module, head: Head, batches: Sequence[Any], on_logits: OnLogits | None = None
) -> Tensor:
    """K_θ(V), (n, n) in double precision, from per-sample Jacobians in pieces of outputs."""
    n = sum(batch_rows(batch) for batch in batches)
    outputs = 0
    with at_rest(model):
        for index, batch in enumerate(batches):
            logits = logits_of(model, unpack(batch)[0])  # (b, …)
            outputs = logits[0].numel()
            if on_logits is not None:
                on_logits(index, logits)
        weights = head_parameters(model, head)
        entries = sum(weight.numel() for weight in weights.values())
        step = max(1, JACOBIAN_ENTRIES_MAX // (n * entries))
        kernel = torch.zeros(n, n, dtype=torch.float64)
        for first in range(0, outputs, step):
            piece = slice(first, min(first + step, outputs))
            rows = [_jacobian(model, weights, unpack(b)[0], piece, outputs) for b in batches]
            jacobian = torch.cat(rows)  # (n, piece·|θ_L|)
            kernel += jacobian @ jacobian.T
    return kernel / outputs


def _jacobian(
    model: nn.Module, weights: dict[str, Tensor], inputs: Any, piece: slice, outputs: int
) -> Tensor:
    """∂h_o/∂θ^(L) for the outputs o of a piece, (b, piece·|θ_L|) on the CPU."""

    def some_outputs(theta: dict[str, Tensor], one: Tensor) -> Tensor:
        logits: Tensor = functional_call(model, theta, (one.unsqueeze(0),))  # (1, …)
        return logits.reshape(-1)[piece]

    if not isinstance(inputs, Tensor):
        raise ValueError("a head without a closed form can be scored on single-tensor inputs only")
    entries = max(outputs, sum(weight.numel() for weight in weights.values()))
    width = piece.stop - piece.start
    jacobian = jacrev(some_outputs, chunk_size=max(1, min(width, VJP_ENTRIES_MAX // entries)))
    samples = max(1, VJP_ENTRIES_MAX // (entries * width))
    x = to_device(inputs, device_of(model))  # (b, …)
    parts = vmap(jacobian, in_dims=(None, 0), chunk_size=samples)(weights, x)
    flat = [part.flatten(2) for part in parts.values()]  # (b, piece, |weight|) each
    return torch.cat(flat, dim=2).flatten(1).to("cpu", torch.float64)
