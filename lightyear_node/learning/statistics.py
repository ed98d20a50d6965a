"""BatchNorm's running mean and variance: observations of a site's data, not weights.

A peer's statistics describe images that we do not have.  Under the guard they are therefore never
used: whenever a peer's model is judged, and after models have been merged, the statistics are
estimated anew from our own inputs.  So a peer is judged as the part of our model that it would
become, and statistics that somebody has tampered with do nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightyear_node.learning.forward import at_rest, batch_rows, logits_of, unpack


def is_statistic(name: str) -> bool:
    """Whether a tensor of this name is a running mean or variance."""
    return name.endswith(("running_mean", "running_var"))


def estimate(model: nn.Module, batches: Iterable[Any]) -> bool:
    """Set the statistics to those of these inputs; False if the model has none to set.

    One forward pass: each layer normalises by its batch, and averages over the batches by their
    size.  A batch of one sample has no variance and is left out.
    """
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None
    ]
    usable = [batch for batch in batches if batch_rows(batch) > 1] if layers else []
    if not usable:
        return False
    usual = [layer.momentum for layer in layers]
    seen = 0
    with at_rest(model):
        try:
            for layer in layers:
                layer.reset_running_stats()
                layer.train()
            for batch in usable:
                rows = batch_rows(batch)
                seen += rows
                for layer in layers:
                    layer.momentum = rows / seen
                logits_of(model, unpack(batch)[0])
        finally:
            for layer, momentum in zip(layers, usual, strict=True):
                layer.momentum = momentum
    return True
