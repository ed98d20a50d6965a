"""Krum and clipping compared with ByzFL, an independent implementation.

ByzFL needs torchvision, so the tests do not depend on it: its results are stored here.  They were
computed with ByzFL 0.0.11 and numpy from the models below; the first model is our own:

    byzfl.Krum(f + 1)(models)    its Krum counts the n − f − 1 nearest, the paper's n − f − 2
    clip = byzfl.CenteredClipping(L=1, tau=second_largest_distance)
    clip.m = models[0]; clip(models)
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from lightyear_node.learning import Candidate, make_rule, shares_of
from lightyear_node.learning.rules import RoundContext
from lightyear_node.types import PeerName, Round
from tests.support.short_vectors import NO_VALIDATION


@dataclass(frozen=True)
class Case:
    models: list[list[float]]
    krum: list[list[float]]
    """For f = 0, 1, …; the last is the largest f that the number of models allows."""
    clipped: list[float]


CASES = [
    Case(
        [[0.0, 0.6, -0.5], [-1.8, -0.9, -2.0], [0.1, 2.7, -1.0]],
        [[0.0, 0.6, -0.5]],
        [-0.4327238544940633, 0.9116190101438361, -1.0550476565228306],
    ),
    Case(
        [
            [-1.2, 1.0, 0.7], [0.2, -1.9, -0.1], [1.4, -2.7, -0.9], [-3.8, -2.6, -3.7],
            [-0.5, -2.5, 0.5],
        ],
        [[0.2, -1.9, -0.1]] * 2,
        [-0.6590105469550541, -1.5724761419377673, -0.49524861792393815],
    ),
    Case(
        [
            [0.3, -0.4, -5.0], [-1.1, -0.1, 0.2], [-3.1, -1.0, -2.0], [-1.6, 2.1, -1.6],
            [-0.1, 1.8, -1.2], [-0.2, 0.2, 0.1],
        ],
        [[-1.1, -0.1, 0.2], [-0.1, 1.8, -1.2]],
        [-0.9565409191593275, 0.43116353029604626, -1.6209432526463075],
    ),
    Case(
        [
            [-2.5, 0.2, 2.7], [-3.1, 1.7, 0.2], [-1.3, 4.0, 1.5], [-2.4, 0.1, 1.2],
            [-0.4, 1.4, -0.1], [1.3, 2.9, -1.4], [0.4, -0.9, 0.3], [-2.4, -1.2, -0.4],
            [1.8, 2.3, -2.6],
        ],
        [[-0.4, 1.4, -0.1], *[[-2.4, 0.1, 1.2]] * 3],
        [-1.017959346169932, 1.1361903968317386, 0.2324718556151355],
    ),
]  # fmt: skip


def merged(name: str, models: list[list[float]], faulty: int | None = None) -> list[float]:
    rule = make_rule(name, {} if faulty is None else {"faulty": faulty})
    sites = [
        Candidate(PeerName(f"s{index}"), {"w": torch.tensor(values, dtype=torch.float64)})
        for index, values in enumerate(models)
    ]
    own, peers = sites[0], sites[1:]
    verdicts = rule.judge(own, peers, NO_VALIDATION, RoundContext(Round(0))).verdicts
    after = dict(rule.merge(own.weights, shares_of(verdicts, peers), Round(0)))
    result: list[float] = after["w"].tolist()
    return result


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{len(case.models)} models")
def test_krum_selects_the_same_model_as_byzfl(case: Case) -> None:
    assert [merged("krum", case.models, f) for f in range(len(case.krum))] == case.krum
    assert merged("krum", case.models) == case.krum[-1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{len(case.models)} models")
def test_clipping_gives_the_same_result_as_byzfl(case: Case) -> None:
    assert merged("scclip", case.models) == pytest.approx(case.clipped, rel=1e-12)
