"""Recipes: a network and how it is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from lightyear_node.lab.tasks.medical_networks import transformer_unet
from lightyear_node.lab.tasks.networks import SmallUNet
from lightyear_node.lab.tasks.transunet import small_transunet, transunet

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
    """All segmentation networks are trained alike; the paper's batch size depends on the task.

    `paper` is the paper's network, `transunet`, of 105 million parameters; the others train on a
    CPU.
    """
    networks: dict[str, Callable[[], nn.Module]] = {
        "paper": transunet,
        "transunet": transunet,
        "transunet-small": small_transunet,
        "unetr": transformer_unet,
        "small": SmallUNet,
    }
    return {
        name: Recipe(network=network, optimizer=adam, lr=1e-3, batch_size=batch_size)
        for name, network in networks.items()
    }
