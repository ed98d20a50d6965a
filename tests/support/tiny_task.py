"""A small task: a network with BatchNorm, some of whose tensors may be excluded from exchange."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightyear_node import Task

CLASSES = 3


class Network(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))


def build(site_index: int = 0, seed: int = 0, samples: int = 120) -> Task:
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(CLASSES, 6, generator=generator)
    generator.manual_seed(1000 + site_index)

    def dataset(count: int) -> TensorDataset:
        labels = torch.arange(count) % CLASSES
        return TensorDataset(centres[labels] + torch.randn(count, 6, generator=generator), labels)

    return Task(
        model=Network,
        loss=functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
        train_data=DataLoader(dataset(samples), 20, shuffle=True),
        val_data=DataLoader(dataset(samples), 64),
        metrics={"accuracy": accuracy},
    )


def accuracy(logits: Tensor, target: Tensor) -> float:
    return float((logits.argmax(1) == target).float().mean())
