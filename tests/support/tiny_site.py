"""A site with a task small enough to train in a moment, and the files of its rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightyear_node import Task
from lightyear_node.config.federation import ExchangeConfig, RuleConfig
from lightyear_node.lab.faulty_site import FaultySite
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.learning import Layout, Weights, exchanged
from lightyear_node.types import Digest, PeerName
from lightyear_node.worker.job_types import CandidateFile

CLASSES = 3


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def samples(count: int = 96) -> tuple[Tensor, Tensor]:
    """Learnable samples: the class is the index of the largest of three inputs."""
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(5))
    return x, x[:, :CLASSES].argmax(1)


def task(**changed: Any) -> Task:
    x, y = samples()
    defaults: dict[str, Any] = {
        "model": net,
        "loss": functional.cross_entropy,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, 0.2),
        "train_data": list(zip(torch.split(x, 16), torch.split(y, 16), strict=True)),
        "val_data": [(x, y)],
        "metrics": {"accuracy": lambda logits, y: (logits.argmax(1) == y).float().mean()},
        "epochs": 5,
    }
    return Task(**{**defaults, **changed})


class TinySite:
    """A site and the files of its rounds."""

    def __init__(self, folder: Path, *, malfunction: str | None = None, **changed: Any) -> None:
        self.folder = folder
        folder.mkdir()
        rule = changed.pop("rule", {})
        self.scale = changed.pop("scale", None)
        self.settings: dict[str, Any] = {
            "name": changed.pop("name", "site-a"),
            "seed": 3,
            "rule": RuleConfig(**rule),
            "device": "cpu",
            "exchange": ExchangeConfig(**changed.pop("exchange", {})),
            "malfunction": MalfunctionConfig(kind=malfunction, scale=self.scale)
            if malfunction
            else None,
        }
        model = changed.pop("model", net)
        self.built: list[nn.Module] = []
        """The models that the task has built since the last start; the site trains the first."""

        def build() -> nn.Module:
            self.built.append(model())
            return self.built[-1]

        self.task = task(model=build, **changed)
        self.local_site = FaultySite(self.task, **self.settings)
        exchange = self.settings["exchange"]
        self.layout = Layout.of(exchanged(model(), exchange.exclude, exchange.include))
        self.model = folder / "model"
        self.local_site.write_initial(self.model)
        self.round = 0
        self.metrics: Mapping[str, float] = {}

    def restart(self) -> None:
        """Replace the worker; only the files remain."""
        self.built.clear()
        self.local_site = FaultySite(self.task, **self.settings)

    def train(self) -> None:
        carry = self.folder / "carry"
        trained = self.local_site.train(
            base=self.model,
            carry=carry if carry.exists() else None,
            round=self.round,
            own=self.path("own"),
            outgoing=self.path("sent"),
            carry_out=self.folder / "carry_out",
        )
        (self.folder / "carry_out").replace(carry)
        self.metrics = trained.metrics

    def finish_round(self, peers: Mapping[str, Path] | None = None) -> None:
        """Merge these peers with equal shares, or none, and go to the next round."""
        candidates = [
            CandidateFile(PeerName(name), str(path), 1, Digest("0" * 64))
            for name, path in (peers or {}).items()
        ]
        merged = self.folder / "merged"
        shares = [(peer, 1 / (len(candidates) + 1)) for peer in candidates]
        self.metrics = self.local_site.merge(
            own=self.path("own"),
            accepted=shares,
            round=self.round,
            out=merged,
            carry=self.folder / "carry",
        ).metrics
        merged.replace(self.model)
        self.round += 1

    def path(self, kind: str) -> Path:
        return self.folder / f"{kind}-{self.round}"

    def weights(self, kind: str, round: int | None = None) -> dict[str, Tensor]:
        path = self.folder / f"{kind}-{self.round if round is None else round}"
        return dict(Weights(path, self.layout))


def distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float((left[name] - right[name]).square().sum()) for name in left))
