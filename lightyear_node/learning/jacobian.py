"""The kernel by its definition, for final layers without a closed form, and for tests.

K_ab = (1/C) ⟨J_θ(x_a), J_θ(x_b)⟩,   J_θ(x) = ∂h(θ;x)/∂θ^(L)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from lightyear_node.errors import InvalidTask
from lightyear_node.learning.final_layer import FinalLayer, final_layer_parameters
from lightyear_node.learning.forward import (
    KeywordInputs,
    OnOutput,
    batch_rows,
    device_of,
    evaluation_mode,
    map_tensors,
    output_of,
    to_device,
    unpack,
)

JACOBIAN_ENTRIES_MAX = 1 << 25
"""Limit of entries of J in memory (256 MiB in double precision); more take several passes."""
VJP_ENTRIES_MAX = 1 << 24
"""Limit of entries of one batched backward pass."""


def _logits(prediction: Tensor) -> Tensor:
    return prediction


def jacobian_kernel(
    model: nn.Module,
    final_layer: FinalLayer,
    batches: Sequence[Any],
    on_output: OnOutput | None = None,
    of_prediction: Callable[[Tensor], Tensor] = _logits,
) -> Tensor:
    """K_θ(V), (n, n) in double precision, from per-sample Jacobians, some outputs at a time.

    `of_prediction` is applied to the predictions: h is what it returns.
    """

    def h(output: Any) -> Tensor:
        return of_prediction(final_layer.prediction(output))

    n = sum(batch_rows(batch) for batch in batches)
    outputs = 0
    with evaluation_mode(model):
        for index, batch in enumerate(batches):
            output = output_of(model, unpack(batch)[0])
            outputs = h(output)[0].numel()
            if on_output is not None:
                on_output(index, output)
        weights = final_layer_parameters(model, final_layer)
        entries = sum(weight.numel() for weight in weights.values())
        step = max(1, JACOBIAN_ENTRIES_MAX // (n * entries))
        kernel = torch.zeros(n, n, dtype=torch.float64)
        for first in range(0, outputs, step):
            piece = slice(first, min(first + step, outputs))
            rows = [_jacobian(model, h, weights, unpack(b)[0], piece, outputs) for b in batches]
            jacobian = torch.cat(rows)  # (n, piece·|θ_L|)
            kernel += jacobian @ jacobian.T
    return kernel / outputs


def _jacobian(
    model: nn.Module,
    h: Callable[[Any], Tensor],
    weights: dict[str, Tensor],
    inputs: Any,
    piece: slice,
    outputs: int,
) -> Tensor:
    """∂h_o/∂θ^(L) for the outputs o of a piece, (b, piece·|θ_L|) on the CPU."""
    moved = to_device(inputs, device_of(model))
    tensors: list[Tensor] = []  # (b, …) each
    map_tensors(lambda tensor: tensors.append(tensor) or tensor, moved)  # type: ignore[func-returns-value]
    if len({tensor.shape[:1] for tensor in tensors}) != 1:
        raise InvalidTask(
            "a final layer without a closed form needs inputs with one entry per sample",
            hint='name a linear layer or a convolution with Task(head="…")',
        )

    def some_outputs(theta: dict[str, Tensor], one: list[Tensor]) -> Tensor:
        rows = iter(one)
        sample = map_tensors(lambda _: next(rows).unsqueeze(0), moved)  # (1, …) each
        named = sample if isinstance(sample, KeywordInputs) else {}
        output = functional_call(model, theta, () if named else (sample,), named)
        return h(output).reshape(-1)[piece]

    entries = max(outputs, sum(weight.numel() for weight in weights.values()))
    width = piece.stop - piece.start
    jacobian = jacrev(some_outputs, chunk_size=max(1, min(width, VJP_ENTRIES_MAX // entries)))
    samples = max(1, VJP_ENTRIES_MAX // (entries * width))
    parts = vmap(jacobian, in_dims=(None, 0), chunk_size=samples)(weights, tensors)
    flat = [part.flatten(2) for part in parts.values()]  # (b, piece, |weight|) each
    return torch.cat(flat, dim=2).flatten(1).to("cpu", torch.float64)
