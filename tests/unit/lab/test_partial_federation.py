"""Federations of a part of a pretrained model: adapters that start at zero, or its last layers."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from lightyear_node.config.federation import ExchangeConfig, RuleConfig
from lightyear_node.config.node import TaskConfig
from lightyear_node.lab.acceptance import HONEST, AcceptanceSpec, measure
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.lab.simulate import SimulationResult, SimulationSpec, make_sites, simulate
from lightyear_node.learning import Candidate, Validation, Weights, exchanged, make_rule
from lightyear_node.learning.guard import DistanceLimits
from lightyear_node.learning.rules import RoundContext
from lightyear_node.types import PeerName, Reason, Round
from tests.support import partial_task
from tests.support.partial_task import INCLUDE

NAMES = [PeerName(f"site-{index}") for index in range(4)]
MUCH_TRAINING = {"epochs": 4, "contrast": 0.2, "lr": 0.01}
WHOLE_UPDATE = [
    MalfunctionConfig(kind="ana"),
    MalfunctionConfig(kind="ana", scale=75),
    MalfunctionConfig(kind="noise"),
    MalfunctionConfig(kind="noise", scale=0.3),
    MalfunctionConfig(kind="sfa"),
    MalfunctionConfig(kind="sfa", scale=0.5),
    MalfunctionConfig(kind="random"),
    MalfunctionConfig(kind="nan"),
]
WEAK_NOISE = [MalfunctionConfig(kind="ana", scale=75), MalfunctionConfig(kind="noise")]
OF_THE_HEAD = [
    MalfunctionConfig(kind="head-flip"),
    MalfunctionConfig(kind="head-scale"),
    MalfunctionConfig(kind="head-scale", scale=3),
    MalfunctionConfig(kind="bias-shift"),
]


def spec(part: str, seed: int, rule: str = "lightyear", **args: Any) -> SimulationSpec:
    entry = "tests.support.partial_task:build"
    return SimulationSpec(
        NAMES,
        10,
        seed,
        RuleConfig(name=rule),
        TaskConfig(entry=entry, args={"part": part, **args}),
        final_only=True,
        exchange=ExchangeConfig(include=INCLUDE[part]),
    )


def accuracy(results: list[SimulationResult]) -> float:
    return mean(value for result in results for value in result.final("accuracy").values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "share"),
    [("adapters", 0.95), ("adapters_and_head", 0.9), ("head", 0.95), ("last_block", 0.95)],
)
def test_honest_parts_are_accepted_and_gain(part: str, share: float) -> None:
    together = [simulate(spec(part, seed, **MUCH_TRAINING)) for seed in range(3)]
    alone = [simulate(spec(part, seed, "local", **MUCH_TRAINING)) for seed in range(3)]
    accepted = [
        verdict.accepted
        for result in together
        for rounds in result.sites.values()
        for one in rounds
        for verdict in one.verdicts
    ]
    assert mean(accepted) >= share
    assert accuracy(together) > accuracy(alone)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["adapters", "adapters_and_head", "head", "last_block"])
def test_no_faulty_part_is_accepted(part: str) -> None:
    """Except weak noise on a head alone: in round 0 a head moves by its norm, as under noise."""
    faults = [one for one in WHOLE_UPDATE if part != "head" or one not in WEAK_NOISE]
    faults += OF_THE_HEAD if part != "adapters" else []
    whole = spec(part, 0, **MUCH_TRAINING)
    rows = measure(
        AcceptanceSpec(NAMES, [0, 1, 4, 9], 0, faults, whole.task, exchange=whole.exchange)
    )
    counted = Counter((row["malfunction"] == HONEST, row["guard"]) for row in rows)
    assert counted[False, True] == 0
    assert counted[False, False] == 4 * 12 * len(faults)
    assert counted[True, True] > 0.8 * 4 * 12  # the limits do not reject everything


def test_the_worst_adapter_within_the_limits_is_rejected_or_does_little_harm(
    tmp_path: Path,
) -> None:
    """An attacker that knows our model, our validation data and the code.

    It follows the gradient of our loss upwards, and moves only the weights that start at zero,
    each up to its extended limit.
    """
    site = next(iter(make_sites(spec("adapters", 0, **MUCH_TRAINING), tmp_path).values()))
    site.train(NAMES[0], Round(0), measure=False)
    task = partial_task.build("adapters", 0, 4, **MUCH_TRAINING)
    torch.manual_seed(0)
    model = task.model()
    start = {n: t.clone() for n, t in exchanged(model, include=INCLUDE["adapters"]).items()}
    with Weights(site.own, site.local_site.wire) as read:
        own = {name: read[name].clone() for name in read}
    zero = [name for name in start if not start[name].any()]
    limits = DistanceLimits.of(own, start, zero_at_start=zero)
    assert len(zero) == 3
    assert set(limits.extended) == set(zero)
    [(x, y)] = list(task.val_data)

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(functional_call(model, weights, (x,)), y)

    validation = Validation(model, [(x, y)])
    context = RoundContext(Round(0), start=start, zero_at_start=zero)
    judge = make_rule("lightyear", {}).judge
    before = float(loss(own))
    for reach in (0.3, 0.6, 0.99):
        theirs = {name: tensor.clone() for name, tensor in own.items()}
        for _ in range(20):
            leaves = {name: theirs[name].requires_grad_() for name in zero}
            slopes = torch.autograd.grad(loss({**theirs, **leaves}), list(leaves.values()))
            for name, slope in zip(zero, slopes, strict=True):
                radius = reach * limits.extended[name] * limits.scales[name]
                step = theirs[name].detach() - own[name] + radius * slope / slope.norm()
                theirs[name] = own[name] + step * min(1.0, radius / float(step.norm()))
        theirs = {name: tensor.detach() for name, tensor in theirs.items()}
        [verdict] = judge(
            Candidate(PeerName("us"), own),
            [Candidate(PeerName("bad"), theirs)],
            validation,
            context,
        ).verdicts
        assert verdict.checks["distance"] <= verdict.checks["distance_max"]
        if verdict.accepted:
            assert float(loss(theirs)) - before <= 0.5 * (math.log(10) - before) + 1e-5
        else:
            assert verdict.reason is Reason.LOSS_REGRET
    assert not verdict.accepted  # at the full reach the loss reveals it
