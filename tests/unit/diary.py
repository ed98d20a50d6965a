"""One site, and the files of its rounds: a task small enough to train in a moment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightyear_node import Task
from lightyear_node.config.agreement import ExchangeTerms, RuleTerms
from lightyear_node.config.site import Malfunction
from lightyear_node.learning import Layout, Weights, exchanged
from lightyear_node.worker.jobs import Candidate
from lightyear_node.worker.site import Site

CLASSES = 3


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def samples(count: int = 96) -> tuple[Tensor, Tensor]:
    """Learnable: the class is where the largest of three inputs stands."""
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(5))
    return x, x[:, :CLASSES].argmax(1)


def task(**changed: Any) -> Task:
    x, y = samples()
    given: dict[str, Any] = {
        "model": net,
        "loss": functional.cross_entropy,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, 0.2),
        "train_data": list(zip(x.split(16), y.split(16), strict=True)),
        "val_data": [(x, y)],
        "metrics": {"accuracy": lambda logits, y: (logits.argmax(1) == y).float().mean()},
        "epochs": 5,
    }
    return Task(**{**given, **changed})


class Diary:
    """A site and the files of its rounds."""

    def __init__(self, folder: Path, *, malfunction: str | None = None, **changed: Any) -> None:
        self.folder = folder
        folder.mkdir()
        rule = changed.pop("rule", {})
        self.scale = changed.pop("scale", None)
        self.terms: dict[str, Any] = {
            "name": changed.pop("name", "site-a"),
            "seed": 3,
            "rule": RuleTerms(**rule),
            "device": "cpu",
            "exchange": ExchangeTerms(**changed.pop("exchange", {})),
            "malfunction": Malfunction(kind=malfunction, scale=self.scale) if malfunction else None,
        }
        self.task = task(**changed)
        self.site = Site(self.task, **self.terms)
        exchange = self.terms["exchange"]
        self.layout = Layout.of(
            exchanged(changed.get("model", net)(), exchange.exclude, exchange.include)
        )
        self.model = folder / "model"
        self.site.write_initial(self.model)
        self.round = 0
        self.metrics: Mapping[str, float] = {}

    def restart(self) -> None:
        """A new worker: nothing but the files is left."""
        self.site = Site(self.task, **self.terms)

    def train(self) -> None:
        carry = self.folder / "carry"
        trained = self.site.train(
            base=self.model,
            carry=carry if carry.exists() else None,
            round=self.round,
            own=self.path("own"),
            outgoing=self.path("sent"),
            carry_out=self.folder / "carry_out",
        )
        (self.folder / "carry_out").replace(carry)
        self.metrics = trained.metrics

    def close(self, peers: Mapping[str, Path] | None = None) -> None:
        """Merge these in equal parts; alone without any."""
        named = [Candidate(name, str(path), 1, "0" * 64) for name, path in (peers or {}).items()]  # type: ignore[arg-type]
        merged = self.folder / "merged"
        shares = [(peer, 1 / (len(named) + 1)) for peer in named]
        self.metrics = self.site.merge(
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
    return sum(float((left[name] - right[name]).square().sum()) for name in left) ** 0.5
