"""The interface to a user's code: a model, its data and how to train it.

    def build(data_root: str, lr: float = 1e-3) -> Task:
        train, val = ChestXray(data_root, "train"), ChestXray(data_root, "val")
        return Task(model=Net, loss=F.cross_entropy,
                    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr),
                    train_data=DataLoader(train, 32, shuffle=True),
                    val_data=DataLoader(val, 64))

`model` is a function without arguments, called with the federation's seed so that every site starts
from the same weights, or a module, whose weights must be equal at every site by other means, such
as a pretrained file.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lightyear_node.errors import ConfigError, TaskFailed

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    Batch = tuple[Any, Any]


@dataclass(kw_only=True)
class Task:
    model: nn.Module | Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    """(output, target) -> one number; the output is what the model returned."""
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    train_data: Iterable[Any]
    val_data: Iterable[Any]
    """Peers' models are judged on it, so it must not be tiny."""
    test_data: Iterable[Any] | None = None
    """Data that metrics are reported on; the validation data if not given."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Functions (prediction, target) -> number, or objects of torchmetrics or MONAI."""
    metric_inputs: Callable[[Any, Any], tuple[Any, Any]] | None = None
    """(output, target) -> what metrics get, such as one-hot masks; by default the prediction, or
    the whole output if there are several, and the target."""
    inferer: Callable[[Any, nn.Module], Any] | None = None
    """(input, model) -> output: runs the model for metrics, as MONAI's inferers do."""
    epochs: int = 1
    samples: int | None = None
    """How many training samples the site has; taken from the loader if not given."""
    head: str | None = None
    """Dotted name of the final layer, if it is not found automatically; of several, the one that
    peers are judged by."""
    output: str | int | Callable[[Any], Any] | None = None
    """The prediction in the model's output, if it is not obvious: a key or attribute, an index, or
    a function of the output."""
    prepare_batch: Callable[[Any], Batch] | None = None
    train_round: Callable[[nn.Module, Optimizer, Any], None] | None = None
    """Replaces the training loop of one round: (model, optimizer, device) -> None."""
    evaluate: Callable[[nn.Module, Any], Mapping[str, float]] | None = None
    """Replaces the metrics of a model: (model, device) -> {"accuracy": 0.9, ...}."""


def load_task(
    entry: str,
    arguments: Mapping[str, Any] = MappingProxyType({}),
    context: Mapping[str, Any] = MappingProxyType({}),
) -> Task:
    """Call the user's `module:function` and return its Task.

    `arguments` are `task.args` of node.yaml.  `context` holds what a node knows (`site_name`,
    `site_index`, `site_count`, `seed`): a builder gets the ones that are among its parameters,
    unless `arguments` sets them.
    """
    return build_task(entry, load_builder(entry), arguments, context)


def load_builder(entry: str) -> Callable[..., Any]:
    """Import the user's `module:function`."""
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
    function: Callable[..., Any] = builder
    return function


def build_task(
    entry: str,
    builder: Callable[..., Any],
    arguments: Mapping[str, Any],
    context: Mapping[str, Any],
) -> Task:
    """Call the user's function, named `entry` in errors, as `load_task` does."""
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
