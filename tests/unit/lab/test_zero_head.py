"""Federations of a network whose final layer starts at exactly zero, so that it has no scale."""

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

NAMES = [PeerName(f"site-{index}") for index in range(4)]
TASK = TaskConfig(entry="tests.support.zero_head_task:build")
ROUNDS = [0, 1, 4, 9]
FAULTS = [
    MalfunctionConfig(kind="ana"),
    MalfunctionConfig(kind="ana", scale=75),
    MalfunctionConfig(kind="ana", scale=50),
    MalfunctionConfig(kind="sfa"),
    MalfunctionConfig(kind="random"),
    MalfunctionConfig(kind="nan"),
    MalfunctionConfig(kind="head-scale"),
    MalfunctionConfig(kind="bias-shift"),
    MalfunctionConfig(kind="bias-shift", scale=3),
    MalfunctionConfig(kind="bias-shift", scale=1),
]


def run(seed: int, rule: str = "lightyear") -> SimulationResult:
    return simulate(SimulationSpec(NAMES, 10, seed, RuleConfig(name=rule), TASK, final_only=True))


@pytest.mark.slow
def test_honest_sites_accept_each_other_and_gain() -> None:
    together = [run(seed) for seed in range(3)]
    accepted = [
        verdict.accepted
        for result in together
        for rounds in result.sites.values()
        for one in rounds
        for verdict in one.verdicts
    ]
    assert len(accepted) == 3 * 10 * 4 * 3
    assert mean(accepted) >= 0.9
    for seed, result in enumerate(together):
        alone = run(seed, "local").final("accuracy")
        assert mean(result.final("accuracy").values()) > mean(alone.values())


@pytest.mark.slow
def test_faulty_weights_are_rejected() -> None:
    rows = measure(AcceptanceSpec(NAMES, ROUNDS, 0, FAULTS, TASK))
    taken = [row for row in rows if row["guard"] and row["malfunction"] != HONEST]
    assert taken == []
    counted = Counter((row["malfunction"] == HONEST, row["guard"]) for row in rows)
    assert counted[False, False] == len(ROUNDS) * 12 * len(FAULTS)
    assert counted[True, True] >= 0.9 * len(ROUNDS) * 12


@pytest.mark.slow
def test_a_flipped_final_layer_is_rejected_once_a_site_has_learned() -> None:
    """In the first rounds it is small, and honest ones point in unrelated directions."""
    flipped = [MalfunctionConfig(kind="head-flip")]
    rows = measure(AcceptanceSpec(NAMES, [4, 9], 0, flipped, TASK))
    counted = Counter(row["guard"] for row in rows if row["malfunction"] != HONEST)
    assert counted == {False: 2 * 12}
