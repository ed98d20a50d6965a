"""Recipes: a network and how it is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from lightyear_node.lab.tasks.medical_networks import transformer_unet
from lightyear_node.lab.tasks.networks import SmallUNet

MakeOptimizer = Callable[[Iterable[nn.Parameter], float], Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    network: Callable[[], nn.Module]
    optimizer: MakeOptimizer
    lr: float
    batch_size: int


def adam(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    return torch.optim.Adam(parameters, lr)


def decaying_adam(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    return torch.optim.Adam(parameters, lr, weight_decay=1e-4)


def sgd(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    return torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=5e-4)


def segmentation_recipes(batch_size: int) -> dict[str, Recipe]:
    """Both segmentation networks are trained alike; the paper's batch size depends on the task."""
    return {
        "paper": Recipe(network=transformer_unet, optimizer=adam, lr=1e-3, batch_size=batch_size),
        "small": Recipe(network=SmallUNet, optimizer=adam, lr=1e-3, batch_size=batch_size),
    }
