"""The trial run of a task names each part that fails, and tries the others nevertheless."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from monai.metrics import DiceMetric
from torch import Tensor, nn

from lightyear_node.config.federation import ExchangeConfig, RuleConfig
from lightyear_node.types import Check, Mark
from lightyear_node.worker.job_types import ExchangeSummary
from lightyear_node.worker.site import LocalSite
from tests.support.model_forms import FORMS
from tests.support.tiny_site import samples, task


def rehearsed(
    *, full: bool = True, exclude: tuple[str, ...] = (), **changed: Any
) -> tuple[dict[str, Check], ExchangeSummary]:
    site = LocalSite(
        task(**changed),
        name="site-a",
        seed=3,
        rule=RuleConfig(),
        device="cpu",
        exchange=ExchangeConfig(exclude=exclude),
    )
    checks, exchange = site.rehearse(full=full)
    return {check.name: check for check in checks}, exchange


def raises(*arguments: Any) -> Any:
    raise KeyError("patient-4711")


class Diverging(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.param_groups[0]["params"][0].fill_(math.nan)


def after_the_first(limit: int) -> Iterator[Any]:
    """Batches of which only some may be read."""
    x, y = samples()
    for _ in range(limit):
        yield x, y
    raise AssertionError("more than one batch was read")


X, Y = samples()


@pytest.mark.parametrize("form", FORMS)
def test_a_task_that_works_passes_every_part(form: str) -> None:
    checks, _ = rehearsed(**FORMS[form]())
    assert list(checks) == ["training", "validation", "metric right"]
    assert {check.mark for check in checks.values()} == {Mark.HOLDS}
    assert checks["training"].about.startswith("one step, loss ")
    assert checks["metric right"].about.startswith("right ")


@pytest.mark.parametrize(
    ("changed", "part", "about", "advice"),
    [
        (
            {"metrics": {"broken": raises, "good": lambda logits, y: 0.5}},
            "metric broken",
            "the metric `broken` raised KeyError: 'patient-4711'",
            "metric_inputs",
        ),
        (
            {"metrics": {"dice": DiceMetric(), "good": lambda logits, y: 0.5}},
            "metric dice",
            "the metric `dice` raised ",
            "metric_inputs",
        ),
        (
            {"train_data": [(X * math.nan, Y)]},
            "training",
            "inputs that are not finite numbers",
            "check the data",
        ),
        (
            {"optimizer": lambda parameters: Diverging(parameters, 0.1)},
            "training",
            "after one step 1 of 4 tensors have values that are not finite numbers: 0.weight",
            "lower the learning rate",
        ),
        ({"train_data": [X]}, "training", "a batch is a Tensor", "prepare_batch"),
        ({"train_data": ["text"]}, "training", "a batch is a str", "prepare_batch"),
        ({"train_data": []}, "training", "the training data is empty", "train_data"),
        ({"train_round": raises}, "training", "KeyError: 'patient-4711'", "place that is named"),
        (
            {"train_round": lambda model, optimizer, device: None},
            "training",
            "took no step of an optimizer",
            "optimizer.step()",
        ),
        ({"test_data": [(X, Y, Y)]}, "validation", "a batch has 3 entries", "prepare_batch"),
        ({"test_data": []}, "validation", "the test data is empty", "test_data"),
        ({"evaluate": raises}, "evaluate", "KeyError: 'patient-4711'", "place that is named"),
    ],
)
def test_a_mistake_is_named_with_advice(
    changed: dict[str, Any], part: str, about: str, advice: str
) -> None:
    checks, _ = rehearsed(**changed)
    broken = {name for name, check in checks.items() if check.mark is Mark.BROKEN}
    assert broken == {part}
    assert about in checks[part].about
    assert advice in checks[part].advice


def test_a_loss_that_returns_a_vector_is_explained() -> None:
    """Validation by classes needs no loss of the task, so building such a model succeeds."""
    checks, _ = rehearsed(loss=nn.CrossEntropyLoss(reduction="none"))
    for part in ("training", "validation"):
        assert checks[part].mark is Mark.BROKEN
        assert "the loss returned" in checks[part].about
        assert "mean" in checks[part].advice
    assert checks["metric accuracy"].mark is Mark.NOT_REACHED


def test_a_loss_that_is_nan_at_the_first_batch_is_explained() -> None:
    checks, _ = rehearsed(loss=lambda output, y: output.sum() * math.nan)
    assert "the loss of the first training batch is nan" in checks["training"].about
    assert checks["validation"].mark is Mark.DIFFERS


def test_only_one_batch_of_each_is_read() -> None:
    checks, _ = rehearsed(train_data=after_the_first(1), test_data=after_the_first(1))
    assert {check.mark for check in checks.values()} == {Mark.HOLDS}


def test_a_training_loop_of_the_task_is_stopped_after_one_step() -> None:
    steps: list[int] = []

    def train_round(model: nn.Module, optimizer: torch.optim.Optimizer, device: Any) -> None:
        for step in range(1000):
            try:
                steps.append(step)
                nn.functional.cross_entropy(model(X), Y).backward()
                optimizer.step()
            except Exception:
                raise AssertionError("the end of the trial is no error of the task") from None

    checks, _ = rehearsed(train_round=train_round)
    assert checks["training"] == Check("training", Mark.HOLDS, "one step of the task's train_round")
    assert steps == [0]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    optimizer.step()  # the hook is gone


def test_texts_of_the_task_are_hidden_unless_they_go_to_a_terminal() -> None:
    checks, _ = rehearsed(full=False, metrics={"broken": raises}, train_round=raises)
    for check in checks.values():
        assert "4711" not in check.about
    assert "raised KeyError (test_rehearsal.py:" in checks["metric broken"].about


def test_long_texts_are_shown_whole() -> None:
    def long(logits: Tensor, labels: Tensor) -> float:
        raise ValueError("x" * 3000)

    checks, _ = rehearsed(metrics={"long": long})
    assert "x" * 3000 in checks["metric long"].about


def test_what_is_exchanged_and_what_stays_is_counted() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    _, everything = rehearsed(model=model)
    assert (everything.tensors, everything.local) == (8, ("1.num_batches_tracked",))
    _, part = rehearsed(model=model, exclude=("1.*",))
    assert (part.tensors, part.local_tensors) == (4, 5)
    assert part.bytes < everything.bytes
