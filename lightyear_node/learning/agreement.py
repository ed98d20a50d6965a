"""The paper's agreement score, exactly, without Jacobians.

    K_ab = (1/C) ⟨J_θ(x_a), J_θ(x_b)⟩,   K̃ = HKH / ‖HKH‖_F,   H = I − 11ᵀ/n
    A(θ_i, θ_j; V) = ⟨K̃_i, K̃_j⟩_F

For a linear head on features f, K_ab = ⟨f_a, f_b⟩ + 1, and H removes the 1.  A convolution sums
⟨patch_p(a), patch_p(b)⟩ over positions p, which is Σ_q m(q) ⟨f_a(q), f_b(q)⟩ with m(q) the number
of window taps that fall on pixel q: scale the maps by √m and the head is linear again.  Strides,
dilation and groups change m, or a constant factor that the norm removes, and nothing else.

With F the features, n × D, there are two forms, each streamed over batches:

    D < n     ‖F_iᵀ H F_j‖² / (‖F_iᵀ H F_i‖ ‖F_jᵀ H F_j‖)     moments, D × D
    D ≥ n     the definition, with K = F Fᵀ                     Gram, n × n

The score does not see the head's own weights (nor its labels): that is what `guard` is for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn

from lightyear_node.learning.forward import OnLogits, at_rest, batch_rows, logits_of, unpack
from lightyear_node.learning.heads import Head, Kind, find_head
from lightyear_node.learning.jacobian import jacobian_kernel

FEATURE_BYTES_MAX = 1 << 30
"""Features held at once for a Gram matrix; beyond it, forward passes are repeated instead."""


def ntk_agreement(
    ours: nn.Module, theirs: nn.Module, batches: Iterable[Any], *, head: str | None = None
) -> float:
    """How alike two networks behave around the samples of `batches`: 1 alike, 0 unrelated.

    NaN if a network's features are not finite; 0 if they do not vary.  The networks may differ in
    width.  `head` names the final layer where it cannot be found.
    """
    held = list(batches)  # a shuffling loader would give each network its own order
    reference = Reference(ours, held, head=head)
    return reference.agreement(theirs, head=find_head(theirs, held[0], head))


def small_sample_floor(d: int, n: int) -> float:
    """What independent isotropic features of width d score on n samples: near τ, τ says little."""
    return d / (d + n)


class Reference:
    """One side of the score, θ_i on V_i, computed once and compared with any number of peers."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        *,
        head: str | Head | None = None,
        on_logits: OnLogits | None = None,
    ) -> None:
        if not batches:
            raise ValueError("the validation set has no batches")
        self.batches = batches
        self.head = head if isinstance(head, Head) else find_head(model, batches[0], head)
        side = _Side(model, self.head, batches, on_logits)
        self.samples = side.samples
        self._rows: list[Tensor] = []  # kept for moments only
        self._kernel: Tensor | None = None
        self.width, stream = side.peek()
        """D, the length of a sample's features; 0 where the head has no closed form."""
        if 0 < self.width < self.samples:
            self._rows = list(stream)
            self._total = torch.stack([rows.sum(0) for rows in self._rows]).sum(0)  # (D,)
            moments = sum((rows.T @ rows for rows in self._rows), start=torch.tensor(0.0))
            self._norm = _norm(_centred(moments, self._total, self._total, self.samples))
        else:
            self._kernel = side.kernel(stream)
            self._norm = _norm(self._kernel)

    @property
    def floor(self) -> float:
        """`small_sample_floor` of this network on this validation set."""
        return small_sample_floor(self.width, self.samples)

    def agreement(
        self, model: nn.Module, *, head: Head | None = None, on_logits: OnLogits | None = None
    ) -> float:
        """A(θ_i, θ_j; V_i), from one forward pass of θ_j."""
        side = _Side(model, head or self.head, self.batches, on_logits)
        width, stream = side.peek()
        if self._rows and 0 < width < self.samples:
            return self._by_moments(stream)
        if self._kernel is None:
            self._kernel = _centre_kernel(torch.cat(self._rows) @ torch.cat(self._rows).T)
        theirs = side.kernel(stream)  # (n, n), centred
        return _ratio(float((self._kernel * theirs).sum()), _norm(self._kernel), _norm(theirs))

    def _by_moments(self, stream: Iterable[Tensor]) -> float:
        cross = own = total = torch.tensor(0.0)
        for ours, theirs in zip(self._rows, stream, strict=True):  # (b, D_i), (b, D_j)
            cross = cross + ours.T @ theirs  # (D_i, D_j)
            own = own + theirs.T @ theirs  # (D_j, D_j)
            total = total + theirs.sum(0)  # (D_j,)
        cross = _centred(cross, self._total, total, self.samples)
        own = _centred(own, total, total, self.samples)
        return _ratio(float(cross.square().sum()), self._norm, _norm(own))


class _Side:
    """One model on the validation set: its features batch by batch, as often as asked."""

    def __init__(
        self, model: nn.Module, head: Head, batches: Sequence[Any], on_logits: OnLogits | None
    ) -> None:
        self.model = model
        self.head = head
        self.batches = batches
        self.on_logits = on_logits
        self.sizes = [batch_rows(batch) for batch in batches]
        self.samples = sum(self.sizes)
        self.origin: Tensor | None = None

    def peek(self) -> tuple[int, Iterator[Tensor]]:
        """The features' length D and their stream, each item (b, D)."""
        if self.head.kind is Kind.GENERAL:
            return 0, iter(())
        stream = self.rows(0, self.on_logits)
        first = next(stream)
        return first.shape[1], chain([first], stream)

    def rows(self, start: int, on_logits: OnLogits | None = None) -> Iterator[Tensor]:
        """Features of the batches from `start` on, relative to those of the very first sample.

        Centring cancels any common shift; this one makes constant features exactly zero and
        leaves little for the subtraction of means to lose.
        """
        module = self.model.get_submodule(self.head.name)
        seen: list[Tensor] = []
        handle = module.register_forward_hook(
            lambda module, args, output: seen.append(_features(module, args[0], output))
        )
        try:
            for index in range(start, len(self.batches)):
                with at_rest(self.model):
                    logits = logits_of(self.model, unpack(self.batches[index])[0])
                features = seen.pop()  # (b, D)
                if len(features) != self.sizes[index]:
                    raise ValueError("the model must keep its samples along the first dimension")
                if on_logits is not None:
                    on_logits(index, logits)
                if self.origin is None:
                    self.origin = features[:1].clone()
                yield features - self.origin
        finally:
            handle.remove()

    def kernel(self, stream: Iterator[Tensor]) -> Tensor:
        """HKH, (n, n); `stream` is the first pass over the rows, already begun."""
        if self.head.kind is Kind.GENERAL:
            kernel = jacobian_kernel(self.model, self.head, self.batches, self.on_logits)
            return _centre_kernel(kernel)
        kernel = torch.zeros(self.samples, self.samples, dtype=torch.float64)
        ends = list(accumulate(self.sizes))
        spans = [slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]
        done = 0
        while done < len(spans):
            held: list[Tensor] = []
            room = FEATURE_BYTES_MAX
            for index, rows in enumerate(stream, start=done):
                room -= rows.nbytes
                if index == done + len(held) and (room >= 0 or not held):
                    held.append(rows)
                for offset, other in enumerate(held):
                    block = (other @ rows.T).cpu()
                    kernel[spans[done + offset], spans[index]] = block
                    kernel[spans[index], spans[done + offset]] = block.T
            done += len(held)
            stream = self.rows(done)
        return _centre_kernel(kernel)


def _features(module: nn.Module, inputs: Tensor, output: Tensor) -> Tensor:
    """What a closed-form head sees of each sample, as one vector, (b, D) in double precision."""
    if inputs.device.type == "mps":  # has no double precision
        inputs = inputs.cpu()
    if isinstance(module, nn.Linear):
        return inputs.double().flatten(1)  # (b, …, d) → (b, D)
    taps = _taps(module, inputs.shape[2:], output.shape[2:]).to(inputs.device)  # (pixels,)
    return (inputs.double().flatten(2) * taps.sqrt()).flatten(1)  # (b, d, pixels) → (b, D)


def _taps(module: nn.Module, inside: Sequence[int], outside: Sequence[int]) -> Tensor:
    """m(q): how many window taps of a convolution fall on each input pixel, (pixels,)."""
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    count = torch.ones((), dtype=torch.float64)
    for axis, (length, windows) in enumerate(zip(inside, outside, strict=True)):
        size, dilation = module.kernel_size[axis], module.dilation[axis]
        match module.padding:
            case "same":
                before = dilation * (size - 1) // 2
            case "valid":
                before = 0
            case padding:
                before = int(padding[axis])
        start = torch.arange(windows) * module.stride[axis] - before  # of each window
        pixel = (start[:, None] + torch.arange(size) * dilation).flatten()
        on_map = pixel[(pixel >= 0) & (pixel < length)]
        count = count[..., None] * torch.bincount(on_map, minlength=length)  # (…, length)
    return count.flatten()


def _centred(moments: Tensor, left: Tensor, right: Tensor, n: int) -> Tensor:
    """Σ (a − ā)(b − b̄)ᵀ from Σ abᵀ, Σ a and Σ b."""
    return moments - torch.outer(left, right) / n


def _centre_kernel(kernel: Tensor) -> Tensor:
    """HKH."""
    rows = kernel - kernel.mean(dim=0, keepdim=True)
    return rows - rows.mean(dim=1, keepdim=True)


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.vector_norm(matrix))


def _ratio(inner: float, ours: float, theirs: float) -> float:
    if not (math.isfinite(inner) and math.isfinite(ours) and math.isfinite(theirs)):
        return math.nan
    if ours == 0 or theirs == 0:
        return 0.0
    return min(1.0, max(0.0, inner / ours / theirs))  # rounding may leave [0, 1] by an ulp
