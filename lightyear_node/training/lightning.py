"""Lightning: every `fit` of a patched trainer is one round.

The trainer builds its optimizers again in every `fit`.  They get their state of the round before as
soon as they exist, and so do schedulers, precision plugin and the counters of epochs and steps.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from lightyear_node.errors import InvalidTask
from lightyear_node.worker.training import count_samples

Receive = Callable[[nn.Module], None]
Send = Callable[..., None]


class LightningRounds:
    """Hooks of a Lightning callback: receives when a `fit` starts, sends when it ends."""

    def __init__(self, trainer: Any, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._epochs = trainer.max_epochs
        self._steps = trainer.max_steps
        self._samples: int | None = None

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        refuse_unsupported(trainer, module)
        self._receive(module)
        self._set_limits(trainer, trainer.current_epoch, trainer.global_step)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._samples = count_samples(trainer.train_dataloader)

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        # What depends on `trainer.max_epochs` (a scheduler's length) sees that of one round.
        self._set_limits(trainer, 0, 0)
        if trainer.is_global_zero:
            self._send(module, samples=self._samples)

    def _set_limits(self, trainer: Any, epochs_done: int, steps_done: int) -> None:
        """Let this `fit` take the trainer's `max_epochs` and `max_steps` more."""
        if self._epochs is not None and self._epochs >= 0:
            trainer.fit_loop.max_epochs = epochs_done + self._epochs
        if self._steps >= 0:
            trainer.fit_loop.epoch_loop.max_steps = steps_done + self._steps


class TrainerState:
    """What a trainer keeps between rounds, as an object for `state`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "optimizers": [one.state_dict() for one in trainer.optimizers],
            "schedulers": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin.state_dict(),
            "loops": trainer.fit_loop.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        if not trainer.optimizers:
            return  # no `fit` is running: its start loads the state
        for optimizer, kept in zip(trainer.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        schedulers = [one.scheduler for one in trainer.lr_scheduler_configs]
        for scheduler, kept in zip(schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(kept)
        trainer.precision_plugin.load_state_dict(state["precision"])
        trainer.fit_loop.load_state_dict(state["loops"])
        for loop in _loops(trainer.fit_loop):
            loop.on_iteration_done()  # a new `fit`, not one that continues in the middle


def patch_trainer(trainer: Any, receive: Receive, send: Send) -> TrainerState:
    """Add the callback to a trainer of `lightning` or `pytorch_lightning`."""
    if any(isinstance(one, LightningRounds) for one in trainer.callbacks):
        raise InvalidTask("`patch` was called twice with the same trainer", hint="call it once")
    # Both names of the library exist, each with its own classes.
    modules = [one.__module__ for one in type(trainer).__mro__]
    older = any(module.startswith("pytorch_lightning") for module in modules)
    base = importlib.import_module("pytorch_lightning" if older else "lightning.pytorch").Callback
    callback = type("LightyearCallback", (LightningRounds, base), {})
    # Before the others: they see the received model.
    trainer.callbacks.insert(0, callback(trainer, receive, send))
    return TrainerState(trainer)


def refuse_unsupported(trainer: Any, module: Any) -> None:
    if not getattr(module, "automatic_optimization", True):
        raise InvalidTask(
            "Lightning: manual optimization is not supported by `patch`",
            hint="set `automatic_optimization = True`, or train in a loop of your own with"
            " `receive`, `state` and `send`",
        )
    if trainer.world_size > 1:
        raise InvalidTask(
            f"Lightning: the trainer uses {trainer.world_size} processes; a node trains in one",
            hint="write `Trainer(devices=1, num_nodes=1)`",
        )


def _loops(loop: Any) -> Iterator[Any]:
    """A loop and all loops inside it."""
    yield loop
    for inner in vars(loop).values():
        if hasattr(inner, "on_iteration_done"):
            yield from _loops(inner)
