"""Scores a model's decisions sample by sample; higher is better.

The loss is not the decision: a model can have a lower loss and decide worse.  A sample's score is

    class labels of samples     1 if the most likely class is right, otherwise 0
    class labels of pixels      mean over classes of the Dice coefficient
    labels 0 and 1              share of outputs on the right side; of pixels, the Dice coefficient
    anything else               minus the loss of a small group of samples

Few decisions differ between two good models, so the losses of the samples are measured beside them:
cross-entropy, of pixels their mean.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

GROUP = 8
"""Least samples of a group: losses such as a partial likelihood need several."""
WORST = -1e9
"""In place of scores that are no finite number, or lower ones."""


def class_scores(logits: Tensor, y: Tensor, ignored: int) -> Tensor:
    """Scores of class labels, (n,); entries with the label `ignored` do not count."""
    chosen = logits.argmax(1)
    known = y != ignored
    if y.ndim == 1:
        return (chosen == y)[known].double()
    dice = []
    for label in range(logits.shape[1]):
        there, found = (y == label) & known, (chosen == label) & known
        dice.append(_dice(there, found))
    by_class = torch.stack(dice)  # (C, n); NaN where neither has the class
    return by_class.nanmean(0).nan_to_num(1.0)


def binary_scores(logits: Tensor, y: Tensor) -> Tensor:
    """Scores of labels 0 and 1, one logit each, (n,)."""
    found, there = logits > 0, y.reshape(logits.shape) > 0.5
    if logits.ndim > 2:
        return _dice(there, found).nan_to_num(1.0)
    return (found == there).reshape(len(logits), -1).double().mean(1)


def class_losses(logits: Tensor, y: Tensor, ignored: int) -> Tensor:
    """Minus the loss of each sample that has a label, (n,)."""
    losses = functional.cross_entropy(
        logits.float(), y.long(), ignore_index=ignored, reduction="none"
    )
    known = y != ignored
    if y.ndim == 1:
        return -losses[known].double()
    pixels = known.flatten(1).sum(1).clamp(min=1)
    return -losses.flatten(1).double().sum(1) / pixels


def binary_losses(logits: Tensor, y: Tensor) -> Tensor:
    """Minus the loss of each sample, (n,); the mean over its labels or pixels."""
    flat = logits.float().reshape(len(logits), -1)
    return (
        -functional.binary_cross_entropy_with_logits(
            flat, y.float().reshape(flat.shape), reduction="none"
        )
        .double()
        .mean(1)
    )


def _dice(there: Tensor, found: Tensor) -> Tensor:
    both = (there & found).flatten(1).sum(1)
    return 2.0 * both.double() / (there.flatten(1).sum(1) + found.flatten(1).sum(1))
