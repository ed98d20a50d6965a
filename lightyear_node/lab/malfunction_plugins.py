"""Attacks, known or the user's own: a function that computes the update a site sends.

    def attack(update, context, **options) -> {name: tensor}

`update` is the site's honest update, `context` an `AttackContext`.  The function is found by its
name among the known attacks, by the entry point of an installed package, by `module:function`, or
is given from Python.  Its result is checked: names, shapes and types are those of the update.

    attack.success = function(model, task, **options) -> float

is optional: the measure of the attack's success at an honest site.  It gets those of the attack's
options that it has parameters for.  `attack.common = True` says that the update is the same at all
colluders, so that simulations compute it once in a round.  Every error names the plug-in.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightyear_node.errors import ConfigError, LightyearError, TaskFailed
from lightyear_node.lab.malfunctions import ATTACKS, MalfunctionConfig, plugin_point
from lightyear_node.lab.suite import nearest
from lightyear_node.learning.forward import evaluation_mode
from lightyear_node.learning.weights import Layout, SchemaMismatch
from lightyear_node.types import PeerName
from lightyear_node.worker.task import Task

Tensors = Mapping[str, Tensor]
Attack = Callable[..., Any]
PAGE = "see docs/own-attack.md"
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackContext:
    """What a rushing adversary sees before it sends, with all that its colluders know.

    Other sites' updates and tasks are seen in simulations only: a real node sends without waiting.
    """

    site: PeerName
    round: int
    """Counted from 0."""
    rounds: int | None
    """Number of rounds of the federation, if it is known."""
    seed: int
    """Differs by site and round; torch's global generator is seeded with it, too."""
    start: Tensors
    """The site's model at the start of the round."""
    colluders: Mapping[PeerName, Tensors]
    """Honest updates of the other malfunctioning sites that take part in this round."""
    honest: Mapping[PeerName, Tensors]
    """Updates that the honest sites send in this round."""
    task: Task
    """The site's task: network, loss and data."""
    train: Callable[[Task], dict[str, Tensor]]
    """Trains one round from `start` on a changed task; returns that update."""
    partners: Mapping[PeerName, Task] = field(default_factory=dict)
    """Tasks of `colluders`."""
    victims: Mapping[PeerName, Task] = field(default_factory=dict)
    """Tasks of the sites in `honest`, for attacks that know the data of their victims."""


@dataclass(frozen=True, slots=True)
class AttackPlugin:
    """A loaded function with its options."""

    name: str
    function: Attack
    options: Mapping[str, Any]

    def corrupted(
        self, update: Tensors, context: AttackContext, layout: Layout
    ) -> dict[str, Tensor]:
        """Return the update to send instead of `update`, which has this layout."""
        own = {name: tensor.clone() for name, tensor in update.items()}
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(context.seed)
                answer = self.function(own, context, **self.options)
        except LightyearError as problem:  # such as of a task that cannot be trained
            raise TaskFailed(f"malfunction {self.name}: {problem}", hint=problem.hint) from problem
        except Exception as error:
            raise TaskFailed(
                f"malfunction {self.name} raised {type(error).__name__}",
                hint=PAGE,
                private=str(error),
            ) from error
        return self._checked(answer, layout)

    @property
    def common(self) -> bool:
        """Whether all colluders send the same update."""
        return bool(getattr(self.function, "common", False))

    @property
    def measures_success(self) -> bool:
        return getattr(self.function, "success", None) is not None

    def success(self, model: nn.Module, task: Task) -> float:
        """How far the attack succeeds with this model at the site of this task."""
        measure: Any = getattr(self.function, "success", None)
        try:
            names = inspect.signature(measure).parameters
            options = {name: value for name, value in self.options.items() if name in names}
            with evaluation_mode(model):
                return float(measure(model, task, **options))
        except LightyearError as problem:
            raise TaskFailed(f"malfunction {self.name}: {problem}", hint=problem.hint) from problem
        except Exception as error:
            raise TaskFailed(
                f"malfunction {self.name}: its `success` raised {type(error).__name__}",
                hint=PAGE,
                private=str(error),
            ) from error

    def _checked(self, answer: Any, layout: Layout) -> dict[str, Tensor]:
        if not isinstance(answer, Mapping):
            raise self._wrong(f"returned a {type(answer).__name__}, not tensors by name")
        for name, value in answer.items():
            if not isinstance(value, Tensor):
                raise self._wrong(f"returned a {type(value).__name__} as {name!r}, not a tensor")
        tensors = {name: tensor.detach() for name, tensor in answer.items()}
        if missing := sorted(layout.entries.keys() - tensors.keys()):
            raise self._wrong(f"returned no tensor {missing[0]!r}")
        if unknown := sorted(str(name) for name in tensors.keys() - layout.entries.keys()):
            raise self._wrong(f"returned a tensor {unknown[0]!r}, which the update does not have")
        try:
            layout.check(tensors)
        except SchemaMismatch as problem:
            raise self._wrong(f"returned a wrong tensor: {problem}") from None
        return tensors

    def _wrong(self, what: str) -> TaskFailed:
        return TaskFailed(
            f"malfunction {self.name} {what}",
            hint=f"return the tensors of `update`, with the same shapes and types; {PAGE}",
        )


def load_plugin(malfunction: MalfunctionConfig, given: Attack | None = None) -> AttackPlugin:
    """The plug-in of a malfunction that is not built in; `given` is a function from Python."""
    name = malfunction.kind
    function = _imported(name) if given is None else given
    if not callable(function):
        raise ConfigError(f"malfunction {name} is not a function", hint=PAGE)
    options = dict(malfunction.options)
    if malfunction.scale is not None:
        options["scale"] = malfunction.scale
    _check_signature(name, function, options)
    return AttackPlugin(name, function, options)


def _imported(name: str) -> Any:
    point = None if name in ATTACKS else plugin_point(name)
    try:
        if point is not None:
            return point.load()
        module, _, path = ATTACKS.get(name, name).partition(":")
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ConfigError(
            f"malfunction {name} cannot be imported: {type(error).__name__}",
            hint="start in the folder that holds its module, or install it in this environment",
            private=str(error),
        ) from error
    return found


def _check_signature(name: str, function: Attack, options: Mapping[str, Any]) -> None:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        return  # written in C: Python cannot tell
    given, rest = parameters[:2], parameters[2:]
    if len(given) < 2 or any(parameter.kind not in POSITIONAL for parameter in given):
        raise ConfigError(f"malfunction {name} does not take (update, context)", hint=PAGE)
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in rest)
    known = [parameter for parameter in rest if parameter.kind in NAMED]
    for parameter in known:
        if parameter.default is parameter.empty:
            raise ConfigError(
                f"malfunction {name}: `{parameter}` is no option",
                hint="every option is a keyword parameter with a default",
            )
    names = [parameter.name for parameter in known]
    for option in options:
        if option not in names and not takes_any:
            raise ConfigError(
                f"malfunction {name} has no option `{option}`",
                hint=nearest(option, names) if names else "it has none",
            )
