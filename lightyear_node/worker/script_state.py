"""What a training script keeps between rounds: the objects that it gave to `state`.

It takes the place of a task's optimizer in the training state file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Protocol

from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightyear_node.errors import InvalidTask
from lightyear_node.worker.task import Task


class Saveable(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any) -> Any: ...


class ScriptState:
    """The registered objects by name.  Has the methods of an optimizer that a site calls."""

    def __init__(self) -> None:
        self._objects: dict[str, Saveable | dict[Any, Any]] = {}
        self._waiting: dict[str, Any] = {}
        """Loaded values of objects that are not registered yet."""
        self.task: Task | None = None
        """Gets the number of training samples, which is part of the state."""
        self.steps = 0
        """Optimizer steps of the last complete round."""

    @property
    def samples(self) -> int:
        return (self.task.samples or 0) if self.task is not None else 0

    @samples.setter
    def samples(self, samples: int) -> None:
        if self.task is not None:
            self.task.samples = samples

    def add(self, *objects: Any, **named: Any) -> None:
        """Register objects; positional ones are named by their position."""
        taken = sum(name.isdecimal() for name in self._objects)
        every = {str(taken + index): one for index, one in enumerate(objects)} | named
        for name, one in every.items():
            has_methods = hasattr(one, "state_dict") and hasattr(one, "load_state_dict")
            if not has_methods and not isinstance(one, dict):
                raise InvalidTask(
                    f"`state`: {self._described(name, one)} has no state_dict and load_state_dict",
                    hint="give an optimizer, a scheduler, a GradScaler or a dict",
                )
            self._objects[name] = one
            if name in self._waiting:
                self._restore(name, self._waiting.pop(name))

    def state_dict(self) -> dict[str, Any]:
        values = {
            name: one if isinstance(one, dict) else one.state_dict()
            for name, one in self._objects.items()
        }
        return {"objects": values, "samples": self.samples, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.samples, self.steps = state["samples"], state["steps"]
        self._waiting = dict(state["objects"])
        for name in self._objects.keys() & self._waiting.keys():
            self._restore(name, self._waiting.pop(name))

    def register_step_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook` before each step of any optimizer: the script's own are not known."""
        return register_optimizer_step_pre_hook(hook)

    def _restore(self, name: str, value: Any) -> None:
        one = self._objects[name]
        try:
            if isinstance(one, dict):
                one.clear()
                one.update(deepcopy(value))
            else:
                one.load_state_dict(value)
        except Exception as problem:  # the object may be the user's own
            raise InvalidTask(
                f"`state`: {self._described(name, one)} does not accept its state of the round"
                " before",
                hint="give `state` the same objects in the same order at every start of the script",
                private=str(problem),
            ) from problem

    @staticmethod
    def _described(name: str, one: Any) -> str:
        return f"object {name} ({type(one).__name__})"
