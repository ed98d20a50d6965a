"""The samples that judge peers and those that confirm the merged model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from lightyear_node.learning.confirmation import SAMPLES_MIN, divided, divisible, selected

X = torch.arange(20.0).reshape(10, 2)
Y = torch.arange(10)


@pytest.mark.parametrize("samples", [SAMPLES_MIN, 9, 101])
def test_no_sample_judges_and_confirms_in_one_round(samples: int) -> None:
    for round in range(6):
        judging, confirming = divided(samples, 7, round)
        assert sorted(judging + confirming) == list(range(samples))
        assert abs(len(judging) - len(confirming)) <= 1


def test_each_sample_confirms_once_in_two_rounds() -> None:
    counts = Counter(number for round in range(8) for number in divided(30, 7, round)[1])
    assert counts == dict.fromkeys(range(30), 4)


def test_the_division_changes_with_the_seed_and_the_round() -> None:
    found = {tuple(divided(30, seed, round)[0]) for seed in (1, 2) for round in range(4)}
    assert len(found) == 8
    assert divided(30, 1, 2) == divided(30, 1, 2)


def test_a_small_set_is_not_divided() -> None:
    judging, confirming = divided(SAMPLES_MIN - 1, 7, 0)
    assert judging == confirming == list(range(SAMPLES_MIN - 1))


def test_samples_are_selected_across_batches() -> None:
    batches = [(X[:4], Y[:4]), (X[4:7], Y[4:7]), (X[7:], Y[7:])]
    chosen = selected(batches, [1, 3, 8])
    assert [y.tolist() for _, y in chosen] == [[1, 3], [8]]
    assert torch.equal(chosen[0][0], X[[1, 3]])
    [(inputs, labels)] = selected([({"a": X, "b": [Y]}, {"c": Y})], [2])
    assert torch.equal(inputs["a"], X[2:3])
    assert inputs["b"][0].tolist() == labels["c"].tolist() == [2]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((X, Y), True),
        (({"a": X, "b": X}, {"c": Y}), True),
        ((X, None), True),
        ((X, Y[:9]), False),
        ((X, torch.tensor(1.0)), False),
    ],
)
def test_batches_with_other_tensors_are_not_divisible(batch: Any, expected: bool) -> None:
    assert divisible([batch]) is expected
