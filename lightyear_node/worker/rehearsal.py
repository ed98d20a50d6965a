"""A trial run of a task before its node starts: one step of training, one batch, every metric.

`check` asks a temporary worker for it.  Each part is tried even if another fails, so that all
mistakes of a task are found at once.  The weights in memory change; no file does.  A training
script takes its step itself and is ended there (`ScriptRehearsal`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightyear_node.errors import LightyearError, TaskFailed
from lightyear_node.learning.forward import map_tensors
from lightyear_node.types import Check, Mark
from lightyear_node.worker.error_redaction import redacted
from lightyear_node.worker.metrics import MetricMeter
from lightyear_node.worker.task import Task
from lightyear_node.worker.training import (
    TrainableModel,
    forward,
    loss_of,
    metric_inputs,
    split_batch,
    train_one_round,
)

TEXT_CHARS_MAX = 4000
NAMES_SHOWN = 5
SHAPES_ADVICE = (
    "compare what it expects with what it gets: see docs/bring-your-own-model.md, and"
    " Task(metric_inputs=...) for what metrics get"
)
TASK_ADVICE = "correct the task at the place that is named"
FINITE_ADVICE = (
    "lower the learning rate, and check the training data for values that are not finite numbers"
)


class _Stepped(BaseException):
    """Ends training after one step; not an `Exception`, which the user's code may catch."""


def rehearse(
    task: Task,
    trainable: TrainableModel,
    test_data: Iterable[Any],
    *,
    full: bool,
    train: bool = True,
) -> list[Check]:
    """Try all that the task does in a round; `full` texts of its exceptions are for a terminal.

    Without `train`, only what is measured: a script trains by itself.
    """
    report = _Reporter(full)
    # Before training, so that a step that ruins the weights does not hide what these find.
    measured = [*_measure(task, trainable, test_data, report)]
    if not train:
        return measured
    return [report.attempt("training", TASK_ADVICE, lambda: _train(task, trainable)), *measured]


class _Reporter:
    def __init__(self, full: bool) -> None:
        self._full = full

    def attempt(self, name: str, advice: str, step: Callable[[], str | Check]) -> Check:
        """Run one part; its result is a text, or the check itself."""
        try:
            found = step()
        except Exception as problem:  # the user's code may raise anything
            text = redacted(problem, full=self._full, chars_max=TEXT_CHARS_MAX)
            hint = problem.hint if isinstance(problem, LightyearError) else None
            return Check(name, Mark.BROKEN, text, hint or advice)
        return found if isinstance(found, Check) else Check(name, Mark.HOLDS, found)


def _train(task: Task, trainable: TrainableModel) -> str:
    """Take the first step of a round as a round does; raises if it ends in no usable weights."""
    inputs_finite = True
    losses: list[float] = []

    def split(batch: Any) -> tuple[Any, Any]:
        nonlocal inputs_finite
        x, y = split_batch(task, batch)
        inputs_finite = inputs_finite and _finite(x)
        return x, y

    def loss(output: Any, target: Any) -> Tensor:
        value = loss_of(task, output, target)
        losses.append(float(value.detach()))
        return value

    watched = replace(task, prepare_batch=split, loss=loss)
    stepped = False
    try:
        with _one_step():
            train_one_round(
                watched, trainable.runner, trainable.optimizer, trainable.device, lambda *_: None
            )
    except _Stepped:
        stepped = True
    if not inputs_finite:
        raise TaskFailed(
            "the first training batch has inputs that are not finite numbers",
            hint="check the data and its preprocessing",
        )
    if losses and not math.isfinite(losses[0]):
        raise TaskFailed(f"the loss of the first training batch is {losses[0]}", hint=FINITE_ADVICE)
    _check_weights(trainable.model)
    if not stepped:
        raise TaskFailed(
            "training took no step of an optimizer",
            hint="call `optimizer.step()` in the task's `train_round`",
        )
    return f"one step, loss {losses[0]:.4g}" if losses else "one step of the task's train_round"


class ScriptRehearsal:
    """The round that `check` gives to a training script: it ends with the first step."""

    def __init__(self, *, full: bool) -> None:
        self._report = _Reporter(full)
        self._watching = ExitStack()
        self._model: nn.Module | None = None

    def begin(self, model: nn.Module) -> None:
        """From now on, the first step of any optimizer ends the script."""
        self._model = model
        self._watching.enter_context(_one_step())

    def end(self, problem: BaseException | None) -> Check:
        """The result of the training; `problem` is what ended the script."""
        self._watching.close()

        def outcome() -> str:
            if isinstance(problem, _Stepped) and self._model is not None:
                _check_weights(self._model)
                return "one step of the script"
            if isinstance(problem, Exception):
                raise problem
            raise TaskFailed(f"the script was ended by {type(problem).__name__}")

        return self._report.attempt("training", TASK_ADVICE, outcome)


@contextmanager
def _one_step() -> Iterator[None]:
    def stop(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        raise _Stepped

    hook = register_optimizer_step_post_hook(stop)
    try:
        yield
    finally:
        hook.remove()


def _check_weights(model: nn.Module) -> None:
    state = model.state_dict()
    bad = [n for n, value in state.items() if isinstance(value, Tensor) and not _finite(value)]
    if bad:
        raise TaskFailed(
            f"after one step {len(bad)} of {len(state)} tensors have values that are not finite"
            f" numbers: {shown(bad)}",
            hint=FINITE_ADVICE,
        )


def _finite(value: Any) -> bool:
    found = True

    def look(tensor: Tensor) -> Tensor:
        nonlocal found
        found = found and (not tensor.is_floating_point() or bool(tensor.isfinite().all()))
        return tensor

    map_tensors(look, value)
    return found


@torch.no_grad()
def _measure(
    task: Task, trainable: TrainableModel, data: Iterable[Any], report: _Reporter
) -> Iterator[Check]:
    """One batch as rounds measure it, then every metric on it."""
    trainable.runner.eval()
    if task.evaluate is not None:
        own = task.evaluate

        def evaluate() -> str:
            found = own(trainable.runner, trainable.device)
            return _values({name: float(value) for name, value in found.items()})

        yield report.attempt("evaluate", TASK_ADVICE, evaluate)
        return
    given: list[Any] = []

    def validate() -> str | Check:
        batch = next(iter(data), None)
        if batch is None:
            raise TaskFailed("the test data is empty", hint="check the task's `test_data`")
        output, target, rows = forward(task, trainable.runner, batch, trainable.device, infer=True)
        loss = float(loss_of(task, output, target))
        if task.metrics:
            given.extend((*metric_inputs(task, output, target), rows))
        about = f"one batch of {rows}, loss {loss:.4g}"
        if math.isfinite(loss):
            return about
        return Check("validation", Mark.DIFFERS, about, "check the data for missing values")

    yield report.attempt("validation", SHAPES_ADVICE, validate)
    for name, metric in task.metrics.items():
        label = f"metric {name}"
        if not given:
            yield Check(label, Mark.NOT_REACHED, "not tried: there is no output to measure")
            continue

        def compute(name: str = name, metric: Any = metric) -> str:
            meter = MetricMeter(name, metric, trainable.device)
            meter.add(*given)
            return _values(meter.result())

        yield report.attempt(label, SHAPES_ADVICE, compute)


def _values(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in found.items()) or "no values"


def shown(names: list[str]) -> str:
    """The first of these names, and that there are more."""
    return ", ".join(names[:NAMES_SHOWN]) + (", …" if len(names) > NAMES_SHOWN else "")
