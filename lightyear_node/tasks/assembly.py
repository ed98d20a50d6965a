"""From samples and a recipe to a Task: what all built-in tasks have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from lightyear_node.errors import ConfigError
from lightyear_node.tasks.losses import Dice
from lightyear_node.tasks.medical_networks import transformer_unet
from lightyear_node.tasks.networks import SmallUNet
from lightyear_node.tasks.prepared import Batches, Parts
from lightyear_node.worker.task import Task

EVALUATION_BATCH = 128
"""Without gradients; large enough to keep a core busy, small enough for feature maps of 64 × 64."""

MakeOptimizer = Callable[[Iterable[nn.Parameter], float], Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A network and how it is trained."""

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


def pick(recipes: Mapping[str, Recipe], network: str) -> Recipe:
    if network not in recipes:
        raise ConfigError(
            f"this task has no network `{network}`", hint="it has: " + ", ".join(recipes)
        )
    return recipes[network]


def assemble(
    recipe: Recipe,
    parts: Parts,
    *,
    loss: Callable[[Tensor, Tensor], Tensor],
    metrics: Mapping[str, Any],
    lr: float | None,
    epochs: int,
    batch_size: int | None,
) -> Task:
    rate = recipe.lr if lr is None else lr
    if epochs < 1:
        raise ConfigError(f"`epochs` is {epochs}", hint="give at least 1")
    if not rate > 0:
        raise ConfigError(f"`lr` is {rate}", hint="give a learning rate above 0")
    batch = recipe.batch_size if batch_size is None else batch_size
    return Task(
        model=recipe.network,
        loss=loss,
        optimizer=lambda parameters: recipe.optimizer(parameters, rate),
        train_data=Batches(*parts.train, batch, shuffle=True),
        val_data=Batches(*parts.val, EVALUATION_BATCH),
        test_data=Batches(*parts.test, EVALUATION_BATCH),
        metrics=metrics,
        epochs=epochs,
    )


def segmentation_recipes(batch_size: int) -> dict[str, Recipe]:
    """The paper trains both of its segmentation networks alike, in batches of different size."""
    return {
        "paper": Recipe(network=transformer_unet, optimizer=adam, lr=1e-3, batch_size=batch_size),
        "small": Recipe(network=SmallUNet, optimizer=adam, lr=1e-3, batch_size=batch_size),
    }


def assemble_segmentation(
    recipe: Recipe, parts: Parts, *, lr: float | None, epochs: int, batch_size: int | None
) -> Task:
    return assemble(
        recipe,
        parts,
        loss=functional.cross_entropy,
        metrics={"dice": Dice()},
        lr=lr,
        epochs=epochs,
        batch_size=batch_size,
    )
