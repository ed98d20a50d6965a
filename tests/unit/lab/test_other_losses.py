"""Closed loops with losses that are not of classes: honest sites accept each other and gain."""

from __future__ import annotations

from collections import Counter
from statistics import mean

import pytest

from lightyear_node.config.federation import RuleConfig
from lightyear_node.config.node import TaskConfig
from lightyear_node.lab.acceptance import HONEST, AcceptanceSpec, measure
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.lab.simulate import SimulationResult, SimulationSpec, simulate
from lightyear_node.types import PeerName

pytestmark = pytest.mark.slow

NAMES = [PeerName(f"site-{index}") for index in range(4)]
SEEDS = range(3)
LOSSES = ["mse", "mse_raw", "mae", "cox", "multi_label", "dice", "info_nce", "gaussian_nll", "pair"]


def task(kind: str, shift: float = 0.0) -> TaskConfig:
    return TaskConfig(entry="tests.support.loss_tasks:build", args={"kind": kind, "shift": shift})


def simulated(task: TaskConfig, seed: int, rule: str = "lightyear") -> SimulationResult:
    return simulate(SimulationSpec(NAMES, 10, seed, RuleConfig(name=rule), task, final_only=True))


@pytest.mark.parametrize("kind", LOSSES)
def test_honest_sites_with_alike_data_accept_each_other_and_gain(kind: str) -> None:
    together = [simulated(task(kind), seed) for seed in SEEDS]
    alone = [simulated(task(kind), seed, "local") for seed in SEEDS]
    accepted = [
        verdict.accepted
        for result in together
        for rounds in result.sites.values()
        for one in rounds
        for verdict in one.verdicts
    ]
    assert len(accepted) == 10 * 4 * 3 * len(SEEDS)
    assert mean(accepted) >= 0.95
    assert _final(together) < _final(alone)


@pytest.mark.parametrize("kind", ["mse", "mae", "cox", "multi_label"])
def test_sites_that_differ_are_no_worse_than_alone(kind: str) -> None:
    shifted = task(kind, shift=0.5)
    together = [simulated(shifted, seed) for seed in SEEDS]
    assert _final(together) <= _final([simulated(shifted, seed, "local") for seed in SEEDS])


@pytest.mark.parametrize("kind", LOSSES)
def test_no_faulty_weights_are_accepted(kind: str) -> None:
    """Noise is relative to the weights, which grow with targets in the thousands."""
    sigma = 1.0 if kind == "mse_raw" else None
    faults = [
        MalfunctionConfig(kind="noise", scale=sigma),
        *(
            MalfunctionConfig(kind=fault)
            for fault in ("ana", "sfa", "random", "nan", "head-flip", "head-scale", "bias-shift")
        ),
    ]
    rows = measure(AcceptanceSpec(NAMES, [0, 1, 4, 9], 0, faults, task(kind)))
    counted = Counter((row["malfunction"] == HONEST, row["guard"]) for row in rows)
    assert counted[False, True] == 0
    assert counted[False, False] == 4 * 12 * len(faults)
    assert counted[True, True] >= 0.9 * 4 * 12


def _final(results: list[SimulationResult]) -> float:
    return mean(loss for result in results for loss in result.final("loss").values())
