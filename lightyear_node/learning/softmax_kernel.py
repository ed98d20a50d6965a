"""The kernel of the class probabilities: h is the softmax of the logits.

    J_θ(x) = S · ∂logits/∂θ^(L),   S = diag(p) − p pᵀ
    K_ab   = (1/C) Σ_q tr(S_a(q) S_b(q)) · (⟨f_a(q), f_b(q)⟩ + 1)
    tr(S_a S_b) = Σ_c p_a p_b (1 − p_a − p_b) + (Σ_c p_a p_b)²

q are the positions of the output: one for a linear layer on vectors; the pixels of a convolution,
where f(q) is the patch that its window covers.  The 1 is the bias.  The classes are the second
dimension of the prediction; a single logit stands for the probability of one of two classes.

Unlike the kernel of the logits, this one depends on the final layer's own weights, through p.

Other layers (grouped, reshaped, without a closed form) take the Jacobian.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightyear_node.learning.final_layer import FinalLayer, FinalLayerKind
from lightyear_node.learning.forward import (
    OnOutput,
    batch_rows,
    evaluation_mode,
    first_rows,
    output_of,
    unpack,
)
from lightyear_node.learning.jacobian import jacobian_kernel

BYTES_MAX = 1 << 30
"""Limit of features in memory; beyond it, forward passes are repeated."""


def softmax_kernel(
    model: nn.Module,
    final_layer: FinalLayer,
    batches: Sequence[Any],
    on_output: OnOutput | None = None,
) -> Tensor:
    """K_θ(V) of the class probabilities, (n, n) in double precision, up to a constant factor."""
    module = model.get_submodule(final_layer.name)
    all_inputs = [unpack(batch)[0] for batch in batches]
    example = first_rows(all_inputs[0], 1)
    if not _is_closed(model, module, final_layer, example):
        return jacobian_kernel(model, final_layer, batches, on_output, probabilities)
    n = sum(batch_rows(batch) for batch in batches)
    kernel = torch.zeros(n, n, dtype=torch.float64)
    [(patches, _)] = _positions(model, module, [example])
    count, width = patches.shape[1:]
    step = max(1, BYTES_MAX // (8 * n * (width + 2 * n)))
    bias = 0.0 if module.bias is None else 1.0
    for start in range(0, count, step):
        piece = slice(start, start + step)
        found = _positions(model, module, all_inputs, None if start else on_output)
        held = [(features[:, piece], p[:, piece]) for features, p in found]
        f, p = (torch.cat(parts).transpose(0, 1) for parts in zip(*held, strict=True))
        kernel += ((f @ f.mT + bias) * _traces(p)).sum(0).cpu()
    return kernel


def probabilities(logits: Tensor) -> Tensor:
    """Softmax over the second dimension; the sigmoid of a single logit."""
    if logits.ndim < 2 or logits.shape[1] == 1:
        return logits.sigmoid()
    return logits.softmax(dim=1)


def _traces(p: Tensor) -> Tensor:
    """tr(S_a S_b) of all pairs of samples at each position: (q, n, C) → (q, n, n)."""
    if p.shape[-1] == 1:
        slope = p * (1 - p)
        return slope @ slope.mT
    same, square = p @ p.mT, p.square()
    return same - square @ p.mT - p @ square.mT + same.square()


def _is_closed(model: nn.Module, module: nn.Module, final_layer: FinalLayer, inputs: Any) -> bool:
    if final_layer.kind is FinalLayerKind.GENERAL or getattr(module, "groups", 1) != 1:
        return False
    [(_, logits, output)] = _calls(model, module, [inputs])
    same_shape = final_layer.prediction(output).shape == logits.shape
    return same_shape and (final_layer.kind is FinalLayerKind.CONV or logits.ndim == 2)


def _calls(
    model: nn.Module, module: nn.Module, all_inputs: Iterable[Any]
) -> Iterator[tuple[Tensor, Tensor, Any]]:
    """The final layer's input and output, and the model's output, for each batch of inputs."""
    captured: list[tuple[Tensor, Tensor]] = []
    handle = module.register_forward_hook(
        lambda module, args, output: captured.append((args[0], output))
    )
    try:
        for inputs in all_inputs:
            with evaluation_mode(model):
                output = output_of(model, inputs)
            yield *captured.pop(), output
    finally:
        handle.remove()


def _positions(
    model: nn.Module,
    module: nn.Module,
    all_inputs: Iterable[Any],
    on_output: OnOutput | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Features (b, q, d) and probabilities (b, q, C) in double precision, for each batch."""
    for index, (features, logits, output) in enumerate(_calls(model, module, all_inputs)):
        if on_output is not None:
            on_output(index, output)
        if features.device.type == "mps":  # MPS has no double precision
            features, logits = features.cpu(), logits.cpu()
        p = probabilities(logits.double())
        if isinstance(module, nn.Linear):
            yield features.double().unsqueeze(1), p.unsqueeze(1)
        else:
            yield _patches(module, features.double(), logits), p.flatten(2).transpose(1, 2)


def _patches(module: nn.Module, inputs: Tensor, output: Tensor) -> Tensor:
    """The pixels under a convolution's window at each position, (b, q, taps·d)."""
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    sides = _padding(module)
    padded = functional.pad(inputs, [side for pair in reversed(sides) for side in pair])
    taps = []
    for offsets in product(*(range(size) for size in module.kernel_size)):
        window = [
            slice(first, first + stride * (length - 1) + 1, stride)
            for first, stride, length in zip(
                (tap * dilation for tap, dilation in zip(offsets, module.dilation, strict=True)),
                module.stride,
                output.shape[2:],
                strict=True,
            )
        ]
        taps.append(padded[(slice(None), slice(None), *window)].flatten(2))  # (b, d, q)
    return torch.cat(taps, dim=1).transpose(1, 2)


def _padding(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> list[tuple[int, int]]:
    """Zeros before and after each axis."""
    if module.padding == "valid":
        return [(0, 0) for _ in module.kernel_size]
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(int(side), int(side)) for side in module.padding]
