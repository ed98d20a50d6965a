"""Writes and reads a model's exchanged tensors: files in full, and updates as they are sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from lightyear_node.config.federation import ExchangeConfig
from lightyear_node.learning import Layout, Weights, rounded, select, write

UNCHANGED = "float32"
"""Value of `exchange.dtype` that sends every tensor in its own type, float64 too."""


class UpdateFiles:
    def __init__(self, model: nn.Module, exchange: ExchangeConfig) -> None:
        chosen = select(model, exchange.include, exchange.exclude)
        tied = {name: first for name, first in chosen.tied.items() if first in chosen.tensors}
        self.layout = Layout.of(chosen.tensors, tied)
        """Layout of files in full, which stay here."""
        self.wire = self.layout
        """Layout of updates, sent and received."""
        if exchange.dtype != UNCHANGED:
            self.wire = self.layout.shortened(getattr(torch, exchange.dtype))
        # First names only: a further name would restore the tensor that merging has replaced.
        self.names = model.state_dict().keys() - chosen.tied.keys()
        self.local_names = self.names - chosen.tensors.keys()
        """The names among these whose tensors are not exchanged."""
        self.warnings = [
            f"exchange.exclude: no tensor of the model matches {pattern!r}"
            for pattern in chosen.unmatched
        ]

    def exchanged(self, model: nn.Module) -> dict[str, Tensor]:
        state = model.state_dict()
        return {name: state[name].detach() for name in self.layout.entries}

    def write_full(
        self, out: Path, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
    ) -> None:
        write(out, self.layout, tensors)

    def read_full(self, path: Path) -> Weights:
        return Weights(path, self.layout)

    def write_update(self, out: Path, tensors: Mapping[str, Tensor]) -> int:
        """Write the update for the peers; return how many entries were too large for its type."""
        self.layout.check(tensors)
        clamped: list[int] = []
        write(out, self.wire, rounded(tensors, self.wire, clamped.append))
        return sum(clamped)

    def read_update(self, path: str) -> Weights:
        return Weights(path, self.layout, self.wire)
