"""Fixtures: small networks with a common start, trained a little further at several sites."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from lightyear_node.learning import exchanged


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """Use one thread and a fixed seed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Site:
    model: nn.Module
    weights: dict[str, Tensor]
    batches: list[tuple[Tensor, Tensor]]
    """The validation set."""


@dataclass(frozen=True)
class Federation:
    """Handwritten digits at four sites, after common and then local training."""

    build: Callable[[], nn.Module]
    start: dict[str, Tensor]
    sites: list[Site]


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in exchanged(model).items()}


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    model.train()
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(len(x)), 32):
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(x[rows]), y[rows]))
            optimizer.step()


def federation(build: Callable[[], nn.Module]) -> Federation:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # (1797, 1, 8, 8)
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    common = build()
    train(common, x[:400], y[:400], epochs=25)
    sites = []
    for rows in torch.arange(400, len(x)).chunk(4):
        model = copy.deepcopy(common)
        keep = len(rows) // 3
        train(model, x[rows[keep:]], y[rows[keep:]], epochs=1)
        batches = list(
            zip(torch.split(x[rows[:keep]], 32), torch.split(y[rows[:keep]], 32), strict=True)
        )
        sites.append(Site(model, copied(model), batches))
    return Federation(build, copied(common), sites)


@pytest.fixture(scope="session")
def digits() -> Federation:
    return federation(
        lambda: nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(256, 64),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(64, 10),
        )
    )


@pytest.fixture(scope="session")
def normalised_digits() -> Federation:
    return federation(
        lambda: nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(256, 10),
        )
    )
