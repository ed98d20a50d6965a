"""The options that all tasks on prepared data sets share, and the builder that adds them.

A task module decorates a function that loads one client's data.  The decorated function is the
task's entry point: its signature is that of the wrapped function's own options and of the shared
ones, so that a wrong argument in node.yaml is refused by name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from inspect import Parameter
from typing import Any

from torch import Tensor
from torch.nn import functional

from lightyear_node.errors import ConfigError
from lightyear_node.lab.tasks.losses import Dice
from lightyear_node.lab.tasks.prepared import (
    Augment,
    Batches,
    DataAmounts,
    SiteData,
    check_site,
)
from lightyear_node.lab.tasks.recipes import Recipe
from lightyear_node.worker.task import Task

EVALUATION_BATCH = 128
"""Without gradients; large enough to keep a core busy, small enough for feature maps of 64 × 64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOptions:
    """What every task on a prepared data set accepts.  None means the recipe's value, or all."""

    data: str | None = None
    """Directory of the prepared data sets; that of the environment if not given."""
    fraction: float = 1.0
    """Share of each split that is used."""
    train_samples: int | None = None
    val_samples: int | None = None
    test_samples: int | None = None
    """At most so many samples of the split."""
    lr: float | None = None
    epochs: int = 1
    batch_size: int | None = None


@dataclass(frozen=True, slots=True)
class ClientSelection:
    """The client whose data a site loads, how much of it, and from which directory."""

    number: int
    amounts: DataAmounts
    data: str | None


@dataclass(frozen=True, slots=True)
class TrainingProblem:
    """One client's data, and what is minimised and measured on it."""

    parts: SiteData
    loss: Callable[[Tensor, Tensor], Tensor]
    metrics: Mapping[str, Any]
    augment: Augment | None = None
    """Changes the inputs of training batches; those of validation and test stay as they are."""


def segmentation(parts: SiteData) -> TrainingProblem:
    return TrainingProblem(parts, functional.cross_entropy, {"dice": Dice()})


def prepared_task(
    name: str, clients: int, recipes: Mapping[str, Recipe], *, network: str | None = "paper"
) -> Callable[[Callable[..., TrainingProblem]], Callable[..., Task]]:
    """Make a task's entry point of a function (client, own options…) -> TrainingProblem.

    `network` is the default recipe; with None the task has a single one and no such option.
    """

    def decorate(load: Callable[..., TrainingProblem]) -> Callable[..., Task]:
        @functools.wraps(load)
        def entry_point(*positional: Any, **keywords: Any) -> Task:
            given = signature.bind(*positional, **keywords)
            given.apply_defaults()
            arguments = given.arguments
            recipe = pick(recipes, arguments.pop("network", next(iter(recipes))))
            number = check_site(
                name, clients, arguments.pop("site_index"), arguments.pop("site_count")
            )
            shared = SharedOptions(**{f.name: arguments.pop(f.name) for f in fields(SharedOptions)})
            amounts = DataAmounts(
                shared.fraction, shared.train_samples, shared.val_samples, shared.test_samples
            )
            problem = load(ClientSelection(number, amounts, shared.data), **arguments)
            return assemble(recipe, problem, shared)

        signature = _signature(load, clients, network)
        entry_point.__signature__ = signature  # type: ignore[attr-defined]
        return entry_point

    return decorate


def _signature(
    load: Callable[..., TrainingProblem], clients: int, network: str | None
) -> inspect.Signature:
    either, keyword = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
    _, *own = inspect.signature(load).parameters.values()
    return inspect.Signature(
        [
            Parameter("site_index", either, default=0),
            Parameter("site_count", either, default=clients),
            *([Parameter("network", keyword, default=network)] if network is not None else []),
            *own,
            *(Parameter(f.name, keyword, default=f.default) for f in fields(SharedOptions)),
        ]
    )


def pick(recipes: Mapping[str, Recipe], network: str) -> Recipe:
    if network not in recipes:
        raise ConfigError(
            f"this task has no network `{network}`", hint="it has: " + ", ".join(recipes)
        )
    return recipes[network]


def assemble(recipe: Recipe, problem: TrainingProblem, options: SharedOptions) -> Task:
    rate = recipe.lr if options.lr is None else options.lr
    if options.epochs < 1:
        raise ConfigError(f"`epochs` is {options.epochs}", hint="give at least 1")
    if not rate > 0:
        raise ConfigError(f"`lr` is {rate}", hint="give a learning rate above 0")
    batch = recipe.batch_size if options.batch_size is None else options.batch_size
    parts = problem.parts
    return Task(
        model=recipe.network,
        loss=problem.loss,
        optimizer=lambda parameters: recipe.optimizer(parameters, rate),
        train_data=Batches(*parts.train, batch, shuffle=True, augment=problem.augment),
        val_data=Batches(*parts.val, EVALUATION_BATCH),
        test_data=Batches(*parts.test, EVALUATION_BATCH),
        metrics=problem.metrics,
        epochs=options.epochs,
    )
