"""The paper's agreement score, computed exactly and without Jacobians.

    K_ab = (1/C) ⟨J_θ(x_a), J_θ(x_b)⟩,   K̃ = HKH / ‖HKH‖_F,   H = I − 11ᵀ/n
    A(θ_i, θ_j; V) = ⟨K̃_i, K̃_j⟩_F

For a linear final layer on features f, K_ab = ⟨f_a, f_b⟩ + 1, and H removes the 1.  A convolution
sums ⟨patch_p(a), patch_p(b)⟩ over positions p, which is Σ_q m(q) ⟨f_a(q), f_b(q)⟩ with m(q) the
number of window taps that fall on pixel q: with the maps scaled by √m, the layer is linear again.
Strides, dilation and groups change only m, or a constant factor that the norm removes.

With F the features, n × D, there are two forms, each computed batch by batch:

    D < n     ‖F_iᵀ H F_j‖² / (‖F_iᵀ H F_i‖ ‖F_jᵀ H F_j‖)     moments, D × D
    D ≥ n     the definition, with K = F Fᵀ                     Gram, n × n

The score depends neither on the final layer's own weights nor on labels: `guard` checks those.

`Reading` has two other readings of the definition.  With `softmax`, h is the class probabilities
(see `softmax_kernel`).  With `unbiased`, HKH is replaced by the U-centred kernel, without its
diagonal (HSIC_1: Song et al. 2012; Székely and Rizzo 2014):

    K̃_ab = K_ab − r_a − r_b + s,   a ≠ b,   r_a = Σ_{c≠a} K_ac / (n − 2),
    s = Σ_{a≠b} K_ab / ((n − 1)(n − 2))

Unrelated networks then score 0 on average for any n ≥ 4, and single scores may be negative.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn

from lightyear_node.errors import InvalidTask
from lightyear_node.learning.final_layer import FinalLayer, FinalLayerKind, find_final_layers
from lightyear_node.learning.forward import OnOutput, batch_rows, evaluation_mode, output_of, unpack
from lightyear_node.learning.jacobian import jacobian_kernel
from lightyear_node.learning.outputs import Choice
from lightyear_node.learning.softmax_kernel import softmax_kernel
from lightyear_node.learning.wrappers import without_wrappers

FEATURE_BYTES_MAX = 1 << 30
"""Limit of features in memory for a Gram matrix; beyond it, forward passes are repeated."""
NO_BATCHES = "the validation set has no batches"
UNBIASED_SAMPLES_MIN = 4


@dataclass(frozen=True, slots=True)
class Reading:
    """What the paper's definition of the score leaves open."""

    softmax: bool = False
    """The network function h is the softmax of the logits, not the logits."""
    unbiased: bool = False
    """The kernels are centred without their diagonals, which removes the small-sample floor."""


AS_DEFINED = Reading()


def ntk_agreement(
    ours: nn.Module,
    theirs: nn.Module,
    batches: Iterable[Any],
    *,
    head: str | None = None,
    output: Choice | None = None,
) -> float:
    """A(θ_i, θ_j; V) of two networks on the samples of `batches`: 1 if alike, 0 if unrelated.

    NaN if a network's features are not finite; 0 if they do not vary.  The networks may differ in
    width.  Of several heads, the smallest score counts.  `head` names the final layer if it is not
    found automatically, or the one that counts; `output` chooses the prediction in the output.
    """
    fixed = list(batches)  # a shuffling loader would give each network another order
    if not fixed:
        raise InvalidTask(NO_BATCHES)
    ours, theirs = without_wrappers(ours), without_wrappers(theirs)
    reference = ReferenceKernels(ours, fixed, find_final_layers(ours, fixed[0], head, output))
    return reference.agreement(theirs, find_final_layers(theirs, fixed[0], head, output))


def small_sample_floor(d: int, n: int) -> float:
    """Score of independent isotropic features of width d on n samples; τ must be well above it."""
    return d / (d + n)


class ReferenceKernels:
    """Our side of the score of a network with one or several heads: the smallest decides.

    Each head takes a forward pass of its own; `on_output` is called during the first.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        final_layers: Sequence[FinalLayer],
        on_output: OnOutput | None = None,
        reading: Reading = AS_DEFINED,
    ) -> None:
        first = ReferenceKernel(model, batches, final_layers[0], on_output, reading)
        others = [
            ReferenceKernel(model, batches, layer, reading=reading) for layer in final_layers[1:]
        ]
        self._kernels = [first, *others]
        self.samples = first.samples

    @property
    def floor(self) -> float:
        """The score of unrelated networks on this validation set."""
        return min(kernel.floor for kernel in self._kernels)

    def agreement(
        self,
        model: nn.Module,
        final_layers: Sequence[FinalLayer] | None = None,
        on_output: OnOutput | None = None,
    ) -> float:
        """The smallest A(θ_i, θ_j; V_i) of all heads; NaN if one is."""
        layers = final_layers or [kernel.final_layer for kernel in self._kernels]
        if len(layers) != len(self._kernels):
            raise InvalidTask(f"the networks have {len(self._kernels)} and {len(layers)} heads")
        scores = [
            kernel.agreement(model, layer, None if index else on_output)
            for index, (kernel, layer) in enumerate(zip(self._kernels, layers, strict=True))
        ]
        return math.nan if any(map(math.isnan, scores)) else min(scores)


class ReferenceKernel:
    """Our side of one head's score, θ_i on V_i, compared with any number of peers."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        final_layer: FinalLayer,
        on_output: OnOutput | None = None,
        reading: Reading = AS_DEFINED,
    ) -> None:
        self.batches = batches
        self.final_layer = final_layer
        self.reading = reading
        features = _Features(model, self.final_layer, batches, on_output, reading)
        self.samples = features.samples
        if reading.unbiased and self.samples < UNBIASED_SAMPLES_MIN:
            raise InvalidTask(
                f"the unbiased agreement needs {UNBIASED_SAMPLES_MIN} validation samples or more,"
                f" not {self.samples}",
                hint="give the site more validation data, or leave out rule.unbiased",
            )
        self._rows: list[Tensor] = []  # for moments only: (b, D) each
        self._kernel: Tensor | None = None
        self.width, stream = features.start()
        """D, the length of a sample's features; 0 if the kernel is not one of features."""
        if 0 < self.width < self.samples and not reading.unbiased:
            self._rows = list(stream)
            self._total = torch.stack([rows.sum(0) for rows in self._rows]).sum(0)  # (D,)
            moments = sum((rows.T @ rows for rows in self._rows), start=torch.tensor(0.0))
            self._norm = _norm(_centred(moments, self._total, self._total, self.samples))
        else:
            self._kernel = features.kernel(stream)
            self._norm = _norm(self._kernel)

    @property
    def floor(self) -> float:
        """`small_sample_floor` of this network on this validation set; 0 if unbiased."""
        return 0.0 if self.reading.unbiased else small_sample_floor(self.width, self.samples)

    def agreement(
        self,
        model: nn.Module,
        final_layer: FinalLayer | None = None,
        on_output: OnOutput | None = None,
    ) -> float:
        """A(θ_i, θ_j; V_i), from one forward pass of θ_j."""
        layer = final_layer or self.final_layer
        features = _Features(model, layer, self.batches, on_output, self.reading)
        width, stream = features.start()
        if self._rows and 0 < width < self.samples:
            return self._by_moments(stream)
        if self._kernel is None:
            self._kernel = _centre_kernel(torch.cat(self._rows) @ torch.cat(self._rows).T)
        theirs = features.kernel(stream)  # (n, n), centred
        inner = float((self._kernel * theirs).sum())
        lowest = -1.0 if self.reading.unbiased else 0.0
        return _ratio(inner, _norm(self._kernel), _norm(theirs), lowest)

    def _by_moments(self, stream: Iterable[Tensor]) -> float:
        cross = own = total = torch.tensor(0.0)
        for ours, theirs in zip(self._rows, stream, strict=True):  # (b, D_i), (b, D_j)
            cross = cross + ours.T @ theirs  # (D_i, D_j)
            own = own + theirs.T @ theirs  # (D_j, D_j)
            total = total + theirs.sum(0)  # (D_j,)
        cross = _centred(cross, self._total, total, self.samples)
        own = _centred(own, total, total, self.samples)
        return _ratio(float(cross.square().sum()), self._norm, _norm(own))


class _Features:
    """A model's features on the validation set, batch by batch; each pass runs the model again."""

    def __init__(
        self,
        model: nn.Module,
        final_layer: FinalLayer,
        batches: Sequence[Any],
        on_output: OnOutput | None,
        reading: Reading,
    ) -> None:
        self.model = model
        self.final_layer = final_layer
        self.batches = batches
        self.on_output = on_output
        self.reading = reading
        self.sizes = [batch_rows(batch) for batch in batches]
        self.samples = sum(self.sizes)
        self.origin: Tensor | None = None

    def start(self) -> tuple[int, Iterator[Tensor]]:
        """Start a pass: the features' length D, and an iterator over batches, each (b, D)."""
        if self.final_layer.kind is FinalLayerKind.GENERAL or self.reading.softmax:
            return 0, iter(())
        stream = self.rows(0, self.on_output)
        first = next(stream)
        return first.shape[1], chain([first], stream)

    def rows(self, start: int, on_output: OnOutput | None = None) -> Iterator[Tensor]:
        """Features of the batches from `start` on, (b, D) each, minus those of the first sample.

        Centring cancels any common shift; this one makes constant features exactly zero and keeps
        the cancellation error of the centring small.
        """
        module = self.model.get_submodule(self.final_layer.name)
        captured: list[Tensor] = []
        handle = module.register_forward_hook(
            lambda module, args, output: captured.append(_features(module, args[0], output))
        )
        try:
            for index in range(start, len(self.batches)):
                with evaluation_mode(self.model):
                    output = output_of(self.model, unpack(self.batches[index])[0])
                features = captured.pop()  # (b, D)
                if len(features) != self.sizes[index]:
                    raise InvalidTask("the model must keep its samples along the first dimension")
                if on_output is not None:
                    on_output(index, output)
                if self.origin is None:
                    self.origin = features[:1].clone()
                yield features - self.origin
        finally:
            handle.remove()

    def kernel(self, stream: Iterator[Tensor]) -> Tensor:
        """The centred kernel, (n, n); `stream` is the pass that `start` has started."""
        centre = _u_centre_kernel if self.reading.unbiased else _centre_kernel
        if self.reading.softmax or self.final_layer.kind is FinalLayerKind.GENERAL:
            compute = softmax_kernel if self.reading.softmax else jacobian_kernel
            return centre(compute(self.model, self.final_layer, self.batches, self.on_output))
        kernel = torch.zeros(self.samples, self.samples, dtype=torch.float64)
        ends = list(accumulate(self.sizes))
        spans = [slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]
        done = 0
        while done < len(spans):
            held: list[Tensor] = []
            bytes_left = FEATURE_BYTES_MAX
            for index, rows in enumerate(stream, start=done):
                bytes_left -= rows.nbytes
                if index == done + len(held) and (bytes_left >= 0 or not held):
                    held.append(rows)
                for offset, other in enumerate(held):
                    block = (other @ rows.T).cpu()
                    kernel[spans[done + offset], spans[index]] = block
                    kernel[spans[index], spans[done + offset]] = block.T
            done += len(held)
            stream = self.rows(done)
        return centre(kernel)


def _features(module: nn.Module, inputs: Tensor, output: Tensor) -> Tensor:
    """Input of a closed-form final layer, one vector per sample, (b, D) in double precision."""
    if inputs.device.type == "mps":  # MPS has no double precision
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
        start = torch.arange(windows) * module.stride[axis] - before  # first tap of each window
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


def _u_centre_kernel(kernel: Tensor) -> Tensor:
    """The U-centred kernel: its inner products are unbiased, and its diagonal is 0."""
    n = len(kernel)
    rest = kernel - torch.diag(kernel.diagonal())
    rows = rest.sum(dim=0) / (n - 2)
    centred = rest - rows[:, None] - rows[None, :] + rest.sum() / ((n - 1) * (n - 2))
    return centred - torch.diag(centred.diagonal())


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.vector_norm(matrix))


def _ratio(inner: float, ours: float, theirs: float, lowest: float = 0.0) -> float:
    if not (math.isfinite(inner) and math.isfinite(ours) and math.isfinite(theirs)):
        return math.nan
    if ours == 0 or theirs == 0:
        return 0.0
    return min(1.0, max(lowest, inner / ours / theirs))  # rounding may leave the range by an ulp
