"""Which error texts may be logged: ours, never text from the user's code or data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._utils import ExceptionWrapper

from lightyear_node.errors import ConfigError, InvalidTask, LightyearError, TaskFailed
from lightyear_node.learning import Candidate
from lightyear_node.learning.rules import FunctionRule, Judgement, RoundContext
from lightyear_node.types import PeerName, Round
from lightyear_node.worker.error_redaction import hides_text, redacted
from lightyear_node.worker.task import Task
from lightyear_node.worker.training import split_batch

SECRET = "patient-4711.dcm"


def judge_with_answer(answer: Any) -> None:
    def rule(own: Any, peers: Any, validation: Any, context: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    candidate = Candidate(PeerName("a"), {"w": torch.zeros(2)})
    FunctionRule("mine", rule).judge(candidate, [candidate], None, RoundContext(Round(0)))  # type: ignore[arg-type]


def split(argument: Any) -> None:
    split_batch(
        Task(**dict.fromkeys(("model", "loss", "optimizer", "train_data", "val_data"))), argument
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("action", "argument", "expected"),
    [
        (
            judge_with_answer,
            ValueError(SECRET),
            "rule mine raised ValueError (test_error_redaction.py:",
        ),
        (judge_with_answer, {"a": SECRET}, "rule mine gave a a share that is no number"),
        (
            judge_with_answer,
            {SECRET: 1.0},
            "rule mine gave a share to a name that is not among its peers",
        ),
        (
            judge_with_answer,
            Judgement((), {"seen": {SECRET}}),
            "rule mine returned a state that JSON cannot",
        ),
        (
            judge_with_answer,
            Judgement((), {SECRET: object()}),
            "rule mine returned a state that JSON cannot",
        ),
        (split, {SECRET: torch.zeros(1), "image": torch.zeros(1)}, 'a batch has no key "label"'),
    ],
)
def test_our_error_text_is_logged_and_the_users_is_not(
    action: Any, argument: Any, expected: str
) -> None:
    with pytest.raises(TaskFailed) as caught:
        action(argument)
    assert redacted(caught.value, full=False).startswith(expected)
    assert SECRET not in redacted(caught.value, full=False)
    assert SECRET not in (caught.value.hint or "")
    assert hides_text(caught.value)


def test_the_full_text_is_logged_on_request() -> None:
    with pytest.raises(TaskFailed) as caught:
        judge_with_answer(ValueError(SECRET))
    assert redacted(caught.value, full=True) == f"rule mine raised ValueError: {SECRET}"


def test_an_error_is_ours_by_its_class_not_by_its_text() -> None:
    text = "the model returned tuple"
    assert redacted(InvalidTask(text), full=False) == text
    assert redacted(ConfigError(text), full=False) == text
    assert text not in redacted(ValueError(text), full=False)
    assert not hides_text(InvalidTask(text))


def test_an_error_from_a_loader_process_does_not_leak_user_text() -> None:
    """torch raises the same class again; its text is the whole traceback, causes included."""
    try:
        try:
            raise OSError(SECRET)
        except OSError as cause:
            raise TaskFailed("our text") from cause
    except TaskFailed:
        wrapped = ExceptionWrapper(where="in a loader")
    with pytest.raises(LightyearError) as caught:
        wrapped.reraise()
    assert SECRET in str(caught.value)
    assert SECRET not in redacted(caught.value, full=False)
    assert "TaskFailed" in redacted(caught.value, full=False)
