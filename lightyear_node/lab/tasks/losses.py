"""Losses and metrics of the built-in tasks that torch does not have."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class WeightedFocalLoss:
    """Mean of −w_y (1 − p_y)^γ ln p_y: easy samples and frequent classes weigh less.

    As in FLamby's Fed-ISIC2019, the mean is over samples and not divided by their weights, and the
    weights are the same at every site: w_c = N / n_c.
    """

    def __init__(self, class_weights: Tensor, gamma: float = 2.0) -> None:
        self.class_weights = class_weights
        self.gamma = gamma

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        log_p = functional.log_softmax(logits, dim=1)  # (n, C)
        log_p = log_p.gather(1, target[:, None])[:, 0]  # (n,), of the true class
        weights = self.class_weights.to(logits)[target]
        return (-weights * (1 - log_p.exp()) ** self.gamma * log_p).mean()


def accuracy(logits: Tensor, target: Tensor) -> float:
    """Share of samples whose largest logit is that of the true class."""
    return (logits.argmax(1) == target).float().mean().item()


def binary_accuracy(logits: Tensor, target: Tensor) -> float:
    """For a single logit: above 0 means class 1.  Both are (n,) or (n, 1)."""
    return ((logits.flatten() > 0) == (target.flatten() > 0.5)).float().mean().item()


class Dice:
    """2|A∩B| / (|A|+|B|) of the foreground, class 1 of the argmax: the mean over images.

    Two empty masks give 1.  Without any image it is NaN.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._sum = 0.0
        self._images = 0

    def update(self, logits: Tensor, target: Tensor) -> None:
        """Logits (n, C, h, w), masks (n, h, w)."""
        found = (logits.argmax(1) == 1).flatten(1)
        truth = (target == 1).flatten(1)
        common = (found & truth).sum(1).double()  # (n,)
        sizes = (found.sum(1) + truth.sum(1)).double()
        each = torch.where(sizes > 0, 2 * common / sizes.clamp(min=1), 1.0)
        self._sum += float(each.sum())
        self._images += len(each)

    def compute(self) -> float:
        return self._sum / self._images if self._images else float("nan")
