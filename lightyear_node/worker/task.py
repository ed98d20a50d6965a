"""What a user brings: a model, its data and how to train it.

    def build(data_root: str, lr: float = 1e-3) -> Task:
        train, val = ChestXray(data_root, "train"), ChestXray(data_root, "val")
        return Task(model=Net, loss=F.cross_entropy,
                    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr),
                    train_data=DataLoader(train, 32, shuffle=True),
                    val_data=DataLoader(val, 64))

`model` is a function without arguments, called under the federation's seed so that every site
starts from the same weights, or a ready module (then its weights must be equal at every site by
some other means, such as a pretrained file).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightyear_node.errors import ConfigError, TaskFailed

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    Batch = tuple[Tensor, Tensor]


@dataclass(kw_only=True)
class Task:
    model: nn.Module | Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    train_data: Iterable[Any]
    val_data: Iterable[Any]
    """The site's private yardstick: peers' models are judged on it, so it must not be tiny."""
    test_data: Iterable[Any] | None = None
    """What metrics are reported on; the validation data when it is not given."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Functions (logits, target) -> number, or objects with update / compute / reset."""
    epochs: int = 1
    samples: int | None = None
    """How many training samples the site has; taken from the loader when not given."""
    head: str | None = None
    """Dotted name of the final layer, where it cannot be found."""
    prepare_batch: Callable[[Any], Batch] | None = None
    train_round: Callable[[nn.Module, Optimizer, Any], None] | None = None
    """Replaces the training loop of one round: (model, optimizer, device) -> None."""
    evaluate: Callable[[nn.Module, Any], Mapping[str, float]] | None = None
    """Replaces the metrics of a model: (model, device) -> {"accuracy": 0.9, ...}."""


def build_task(entry: str, arguments: Mapping[str, Any], context: Mapping[str, Any]) -> Task:
    """Call the user's `module:function`.

    A builder may ask for `site_name`, `site_index`, `site_count` and `seed` simply by naming them
    among its parameters; what node.yaml gives under `args` wins.
    """
    module_name, _, function_name = entry.partition(":")
    try:
        builder: Any = importlib.import_module(module_name)
        for part in function_name.split("."):
            builder = getattr(builder, part)
    except ModuleNotFoundError as problem:
        if problem.name and not module_name.startswith(problem.name):
            raise _needs(entry, problem) from problem
        raise ConfigError(
            f"task `{entry}`: no module named `{problem.name}`",
            hint="start in the folder that holds it, or install it in this environment",
        ) from problem
    except AttributeError as problem:
        raise ConfigError(
            f"task `{entry}`: the module has no `{function_name}`",
            hint="check `task.entry` in node.yaml",
        ) from problem
    parameters = inspect.signature(builder).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    unknown = [key for key in arguments if key not in parameters and not takes_any]
    if unknown:
        raise ConfigError(
            f"task `{entry}` takes no argument `{unknown[0]}`",
            hint=f"it takes: {', '.join(parameters) or 'none'}",
        )
    asked = {key: value for key, value in context.items() if key in parameters}
    try:
        task = builder(**{**asked, **arguments})
    except ModuleNotFoundError as problem:
        raise _needs(entry, problem) from problem
    if not isinstance(task, Task):
        raise TaskFailed(
            f"task `{entry}` returned {type(task).__name__}, not a Task",
            hint="end it with `return Task(model=..., loss=..., ...)`",
        )
    return task


def _needs(entry: str, problem: ModuleNotFoundError) -> ConfigError:
    extra = " (pip install 'lightyear-node[demo]')" if problem.name == "sklearn" else ""
    return ConfigError(
        f"task `{entry}` needs the package `{problem.name}`, which is not installed",
        hint=f"install it in this environment{extra}",
    )
