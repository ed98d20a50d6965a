"""A network with two heads: one classifies, the other measures; labels are a dictionary."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightyear_node import Task


class Lesion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
        self.kind, self.diameter = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.trunk(x)
        return {"kind": self.kind(features), "diameter": self.diameter(features)}


def loss(output: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    kind = F.cross_entropy(output["kind"], target["kind"])
    return kind + F.mse_loss(output["diameter"], target["diameter"])


def accuracy(output: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    return (output["kind"].argmax(1) == target["kind"]).float().mean()


def samples(count: int, seed: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """The site's own data; here synthetic."""
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    diameter = x[:, 3:5].sum(1, keepdim=True)
    return [(a, {"kind": a[:3].argmax(), "diameter": b}) for a, b in zip(x, diameter, strict=True)]


def build(site: int = 0) -> Task:
    return Task(
        model=Lesion,
        loss=loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 3e-3),
        train_data=DataLoader(samples(240, 10 + site), 24, shuffle=True),
        val_data=DataLoader(samples(120, 90 + site), 60),
        metrics={"accuracy": accuracy},
        epochs=2,
    )
