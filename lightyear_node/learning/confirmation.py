"""Divides the validation samples of a round into those that judge peers and those that confirm.

A sample that judges a peer's model helps to select it, so that the selected models look better on
it than they are.  The other half is never used to accept a model in that round: it measures the
merged model, and compares it with the one trained alone.

The halves change with every round and follow from a seed that only this site knows.  Two rounds in
a row use both halves of one division, so that each sample confirms once in two rounds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightyear_node.learning.forward import batch_rows, map_tensors

SAMPLES_MIN = 8
"""With fewer samples all of them judge and confirm: halves would say too little."""


def divided(samples: int, seed: int, round: int) -> tuple[list[int], list[int]]:
    """The numbers of the samples that judge, and of those that confirm."""
    if samples < SAMPLES_MIN:
        return list(range(samples)), list(range(samples))
    digest = hashlib.sha256(f"confirmation/{seed}/{round // 2}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    order = torch.randperm(samples, generator=generator).tolist()
    first, second = sorted(order[: samples // 2]), sorted(order[samples // 2 :])
    return (first, second) if round % 2 == 0 else (second, first)


def divisible(batches: Sequence[Any]) -> bool:
    """Whether every tensor of every batch has one entry per sample."""
    return all(_one_entry_per_sample(batch) for batch in batches)


def selected(batches: Sequence[Any], samples: Sequence[int]) -> list[Any]:
    """The batches with only these samples, counted over all batches; empty ones are left out."""
    chosen = []
    first = 0
    for batch in batches:
        rows = batch_rows(batch)
        here = [number - first for number in samples if first <= number < first + rows]
        if here:
            chosen.append(rows_of_batch(batch, here))
        first += rows
    return chosen


def rows_of_batch(batch: Any, rows: Sequence[int]) -> Any:
    """These samples of a divisible batch."""
    return map_tensors(lambda tensor: tensor[list(rows)], batch)


def _one_entry_per_sample(batch: Any) -> bool:
    rows, fits = batch_rows(batch), True

    def check(tensor: Tensor) -> Tensor:
        nonlocal fits
        fits = fits and tensor.ndim > 0 and len(tensor) == rows
        return tensor

    map_tensors(check, batch)
    return fits
