"""Estimates BatchNorm's running mean and variance from our own inputs.

A peer's statistics describe its data, not ours.  With the guard they are never used: they are
estimated from our inputs before a peer's model is judged and after models are merged.  So a peer is
judged as it would act in our merged model, and manipulated statistics have no effect.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightyear_node.learning.forward import batch_rows, evaluation_mode, output_of, unpack


def is_statistic(name: str) -> bool:
    """Whether a tensor of this name is a running mean or variance."""
    return name.endswith(("running_mean", "running_var"))


def estimate_statistics(model: nn.Module, batches: Iterable[Any]) -> bool:
    """Set the statistics to those of these inputs; False if the model has none.

    One forward pass: each layer normalizes by its batch and averages over the batches, weighted by
    their size.  A batch of one sample has no variance and is skipped.
    """
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None
    ]
    usable = [batch for batch in batches if batch_rows(batch) > 1] if layers else []
    if not usable:
        return False
    momenta = [layer.momentum for layer in layers]
    rows_seen = 0
    with evaluation_mode(model):
        try:
            for layer in layers:
                layer.reset_running_stats()
                layer.train()
            for batch in usable:
                rows = batch_rows(batch)
                rows_seen += rows
                for layer in layers:
                    layer.momentum = rows / rows_seen
                output_of(model, unpack(batch)[0])
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum
    return True
