"""The predictions in a model's output: the tensors that agreement and guard look at.

A model may return a tensor, a tuple, list or dictionary of tensors (one for each of its heads), or
an object with `logits`, such as Hugging Face's.  `Choice` selects the prediction in any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightyear_node.errors import InvalidTask

Choice = str | int | Callable[[Any], Any]
"""A key or attribute, an index, or a function of the output."""

LOGITS = "logits"
HINT = (
    "choose the prediction with Task(output=...): a key, an index, or a function of the output that"
    " returns a tensor"
)


def predictions(output: Any, choice: Choice | None = None) -> dict[str, Tensor]:
    """The predictions by their key or index; a single tensor has the name "".

    An entry that is None is skipped: optional parts of an output often are.
    """
    chosen = _logits(output) if choice is None else _choose(output, choice)
    if isinstance(chosen, Tensor):
        entries: dict[str, Any] = {"": chosen}
    elif isinstance(chosen, Mapping):
        entries = {str(key): value for key, value in chosen.items() if value is not None}
    elif isinstance(chosen, tuple | list):
        entries = {str(key): value for key, value in enumerate(chosen) if value is not None}
    else:
        raise InvalidTask(f"the model returned {type(chosen).__name__}, not a tensor", hint=HINT)
    for name, value in entries.items():
        about = f"entry {name!r} of the model's output" if name else "the model's output"
        if not isinstance(value, Tensor):
            raise InvalidTask(f"{about} is {type(value).__name__}, not a tensor", hint=HINT)
        if value.ndim == 0:
            raise InvalidTask(f"{about} is one number, not one for each sample", hint=HINT)
    if not entries:
        raise InvalidTask("the model's output has no tensor", hint=HINT)
    return entries


def sole_prediction(output: Any, choice: Choice | None = None) -> Tensor | None:
    """The prediction of a model with one head; None if it has several."""
    found = list(predictions(output, choice).values())
    return found[0] if len(found) == 1 else None


def _logits(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    found = output.get(LOGITS) if isinstance(output, Mapping) else getattr(output, LOGITS, None)
    return output if found is None else found


def _choose(output: Any, choice: Choice) -> Any:
    if callable(choice):
        return choice(output)
    if isinstance(output, Tensor):  # as of a model with further outputs in training only
        return output
    try:
        if isinstance(choice, str) and not isinstance(output, Mapping):
            return getattr(output, choice)
        return output[choice]
    except (AttributeError, KeyError, IndexError, TypeError):
        has = f"; it has {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
        raise InvalidTask(
            f"the model returned {type(output).__name__}, in which Task(output={choice!r}) finds"
            " nothing",
            hint=f"correct `output` in the task{has}",
        ) from None
