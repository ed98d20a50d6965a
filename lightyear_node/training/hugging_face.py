"""Hugging Face: every `train` of a patched `transformers.Trainer` is one round.

The model and the seeds are received before the trainer makes its data loader; optimizer, scheduler
and scaler get their state when they exist.  A scheduler that the trainer makes itself spans all
rounds of the federation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from typing import Any

from lightyear_node.errors import InvalidTask
from lightyear_node.worker.training import count_samples

Verb = Callable[..., None]


class OptimizerState:
    """Optimizer, scheduler and scaler of a trainer, as an object for `state`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._own_optimizer = trainer.optimizer is None
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {name: one.state_dict() for name, one in self._parts().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state until `apply`: the optimizer may not exist yet."""
        self._loaded = state

    def apply(self) -> None:
        if self._loaded is not None:
            for name, one in self._parts().items():
                one.load_state_dict(self._loaded[name])

    def forget(self) -> None:
        """Let the next round make a new optimizer, as in a process that has just started."""
        if self._own_optimizer:
            self._trainer.optimizer = None

    def _parts(self) -> dict[str, Any]:
        trainer = self._trainer
        parts = {"optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}
        scaler = trainer.accelerator.scaler
        return parts if scaler is None else {**parts, "scaler": scaler}


class HuggingFaceRounds:
    """Hooks of a `TrainerCallback`."""

    def __init__(self, state: OptimizerState) -> None:
        self._state = state

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._state.apply()


def patch_trainer(trainer: Any, receive: Verb, send: Verb, rounds: int) -> OptimizerState:
    """Make each `trainer.train()` receive, train and send."""
    if trainer.args.world_size > 1:
        raise InvalidTask(
            f"transformers: the trainer uses {trainer.args.world_size} processes; a node trains in"
            " one",
            hint="start the node without torchrun or accelerate launch",
        )
    if trainer.model_init is not None:
        raise InvalidTask(
            "transformers: a trainer with `model_init` builds its model again in every round",
            hint="write `Trainer(model=model)` with the model that `init` got",
        )
    if any(isinstance(one, HuggingFaceRounds) for one in trainer.callback_handler.callbacks):
        raise InvalidTask("`patch` was called twice with the same trainer", hint="call it once")
    base = importlib.import_module("transformers").TrainerCallback
    state = OptimizerState(trainer)
    callback = type("LightyearCallback", (HuggingFaceRounds, base), {})
    # Before the others: they see the optimizer with its state.
    trainer.callback_handler.callbacks.insert(0, callback(state))
    train, create_scheduler = trainer.train, trainer.create_scheduler

    @wraps(create_scheduler)
    def spanning_all_rounds(num_training_steps: int, *given: Any, **named: Any) -> Any:
        return create_scheduler(num_training_steps * rounds, *given, **named)

    @wraps(train)
    def one_round(*given: Any, **named: Any) -> Any:
        receive(trainer.model)
        result = train(*given, **named)
        if trainer.is_world_process_zero():
            send(trainer.model, samples=count_samples(trainer.train_dataset))
        state.forget()
        return result

    trainer.create_scheduler, trainer.train = spanning_all_rounds, one_round
    return state
