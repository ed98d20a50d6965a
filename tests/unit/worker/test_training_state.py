"""The training state file returns every value that state dicts hold, with its type."""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from lightyear_node.errors import InvalidTask
from lightyear_node.worker import training_state


def returned(value: Any, path: Path) -> Any:
    training_state.save(path, {"kept": value})
    return training_state.load(path)["kept"]


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**70),
        1e-300,
        math.inf,
        -math.inf,
        "ü\n",
        b"\x00\xff",
        [],
        (),
        {},
        (1, (2, [3, (4,)])),
        {1: "one", "1": "text", (2, 3): None, None: 0.5, 1.5: True},
        {"pairs": 1, "__tensor__": "x", "tuple": {"set": 2}},
        Counter({3: 2, "a": 1}),
        OrderedDict([("b", 1), ("a", 2)]),
        {1, 2},
        frozenset({"x"}),
        numpy.float32(0.1),
        numpy.float64(0.1),
        numpy.int64(2**40),
        numpy.bool_(True),
        random.Random(3).getstate(),
    ],
    ids=repr,
)
def test_a_value_returns_with_its_type(tmp_path: Path, value: Any) -> None:
    found = returned(value, tmp_path / "state")
    assert found == value
    assert type(found) is type(value)


def test_not_a_number_returns(tmp_path: Path) -> None:
    assert math.isnan(returned({"best": math.nan}, tmp_path / "state")["best"])


def test_tensors_and_arrays_return_with_type_and_shape(tmp_path: Path) -> None:
    value = {
        "bf16": torch.ones(2, 3, dtype=torch.bfloat16),
        "scalar": [torch.tensor(7)],
        "view": torch.arange(6).reshape(2, 3).T,
        "array": numpy.arange(6, dtype=numpy.float32).reshape(2, 3)[:, ::2],
    }
    found = returned(value, tmp_path / "state")
    for name in ("bf16", "view"):
        assert found[name].dtype == value[name].dtype  # type: ignore[attr-defined]
        assert torch.equal(found[name], value[name])  # type: ignore[arg-type]
    assert torch.equal(found["scalar"][0], torch.tensor(7))
    assert found["array"].dtype == numpy.float32
    assert numpy.array_equal(found["array"], value["array"])  # type: ignore[arg-type]


def schedulers(optimizer: torch.optim.Optimizer) -> list[Any]:
    make = torch.optim.lr_scheduler
    return [
        make.MultiStepLR(optimizer, [1, 1, 3]),
        make.OneCycleLR(optimizer, 0.1, total_steps=20),
        make.ReduceLROnPlateau(optimizer, patience=0),
        make.CosineAnnealingWarmRestarts(optimizer, 3),
        make.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
        make.SequentialLR(
            optimizer,
            [make.ConstantLR(optimizer, 0.5), make.ExponentialLR(optimizer, 0.9)],
            milestones=[2],
        ),
    ]


@pytest.mark.parametrize("index", range(6))
def test_every_kind_of_scheduler_continues(tmp_path: Path, index: int) -> None:
    def made() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1, momentum=0.9)
        return optimizer, schedulers(optimizer)[index]

    def advance(optimizer: torch.optim.Optimizer, scheduler: Any) -> float:
        optimizer.step()
        given = [1.0] if index == 2 else []
        scheduler.step(*given)
        return float(optimizer.param_groups[0]["lr"])

    pair = made()
    for _ in range(2):
        advance(*pair)
    state = returned([one.state_dict() for one in pair], tmp_path / "state")
    other = made()
    for one, kept in zip(other, state, strict=True):
        one.load_state_dict(kept)
    rates = [(advance(*pair), advance(*other)) for _ in range(5)]
    assert [mine for mine, _ in rates] == [theirs for _, theirs in rates]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [0, {"model": torch.nn.Linear(1, 1)}]}, "kept.a.1.model is a Linear"),
        ({"f": lambda: 0}, "kept.f is a function"),
        (numpy.array(["text"]), "kept is a ndarray"),
        ({"when": 1j}, "kept.when is a complex"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path: Path, value: Any, words: str) -> None:
    with pytest.raises(InvalidTask, match=words):
        returned(value, tmp_path / "state")
    assert not (tmp_path / "state").exists()
