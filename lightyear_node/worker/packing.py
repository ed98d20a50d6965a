"""What of a model travels and as what: its way into files, and out of those that peers send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from lightyear_node.config.agreement import ExchangeTerms
from lightyear_node.learning import Layout, Weights, rounded, select, write

WHOLE = "float32"
"""The type under which weights travel as they are, doubles too."""


class Packing:
    def __init__(self, model: nn.Module, exchange: ExchangeTerms) -> None:
        chosen = select(model, exchange.include, exchange.exclude)
        tied = {name: first for name, first in chosen.tied.items() if first in chosen.tensors}
        self.layout = Layout.of(chosen.tensors, tied)
        """Of the files that stay here, in full."""
        self.wire = self.layout
        """Of the files that are sent and received."""
        if exchange.dtype != WHOLE:
            self.wire = self.layout.shortened(getattr(torch, exchange.dtype))
        # By their first names only: a second name would bring back what merging has replaced.
        self.names = model.state_dict().keys() - chosen.tied.keys()
        self.at_home = self.names - chosen.tensors.keys()
        """Of these, what does not travel."""
        self.warnings = [
            f"exchange.exclude: no tensor of the model matches {pattern!r}"
            for pattern in chosen.idle
        ]

    def exchanged(self, model: nn.Module) -> dict[str, Tensor]:
        state = model.state_dict()
        return {name: state[name].detach() for name in self.layout.entries}

    def keep(self, out: Path, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        write(out, self.layout, tensors)

    def kept(self, path: Path) -> Weights:
        return Weights(path, self.layout)

    def send(self, out: Path, tensors: Mapping[str, Tensor]) -> int:
        """Write what the peers get; returns how many entries were too large for its type."""
        self.layout.check(tensors)
        clamped: list[int] = []
        write(out, self.wire, rounded(tensors, self.wire, clamped.append))
        return sum(clamped)

    def received(self, path: str) -> Weights:
        return Weights(path, self.layout, self.wire)
