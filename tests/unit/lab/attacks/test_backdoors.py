"""Backdoors: the trigger, the poisoned data, and the measure of success."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightyear_node import Task
from lightyear_node.config.federation import RuleConfig
from lightyear_node.errors import InvalidTask
from lightyear_node.lab.attacks.backdoors import Trigger, backdoor, success
from lightyear_node.lab.malfunctions import ATTACK_SUCCESS
from lightyear_node.lab.simulate import GivenFunctions, simulate
from lightyear_node.types import Served
from lightyear_node.worker.training import split_batch
from tests.support import tiny_task
from tests.support.recorded_attacks import COLLUDERS, SPEC, A, C, context_of, named

TINY = tiny_task.build()


class FollowsFirstFeature(nn.Module):
    """Answers class 0 where the first feature is large, otherwise class 1."""

    def forward(self, x: Tensor) -> Tensor:
        large = x.flatten(1)[:, 0] > 2
        return torch.stack([large.float(), (~large).float()], 1)


def on(x: Tensor, y: Tensor, **fields: Any) -> Task:
    return replace(TINY, val_data=[(x, y)], test_data=None, **fields)


def test_images_get_a_bright_corner_and_tables_a_fixed_value() -> None:
    image = Trigger.of(0, 2, 0, None).set_in(torch.zeros(3, 1, 4, 4))
    assert image[:, :, :2, :2].eq(1).all()
    assert image.sum() == 3 * 4
    table = Trigger.of(0, 2, 1, None).set_in(torch.zeros(3, 4))
    assert table.tolist() == [[0, 3, 0, 0]] * 3
    assert Trigger.of(0, 2, 1, -1).set_in(torch.zeros(1, 2)).tolist() == [[0, -1]]


@pytest.mark.parametrize("x", [{"ids": torch.zeros(2, 3)}, torch.zeros(3), [torch.zeros(2, 2)]])
def test_other_inputs_are_refused(x: Any) -> None:
    with pytest.raises(InvalidTask, match="inputs that are one tensor"):
        Trigger.of(0, 2, 0, None).set_in(x)


def test_success_counts_samples_of_other_classes_only() -> None:
    task = on(torch.zeros(4, 2), torch.tensor([0, 1, 1, 0]))
    assert success(FollowsFirstFeature(), task) == 1.0
    assert success(FollowsFirstFeature(), task, value=1.0) == 0.0
    assert success(FollowsFirstFeature(), task, feature=1) == 0.0
    assert success(FollowsFirstFeature(), task, target=1) == 0.0
    assert math.isnan(success(FollowsFirstFeature(), on(torch.zeros(2, 2), torch.zeros(2).long())))


def test_success_is_measured_on_the_test_data_if_there_are_some() -> None:
    task = on(torch.zeros(2, 2), torch.tensor([0, 0]))
    with_test = replace(task, test_data=[(torch.zeros(2, 2), torch.tensor([1, 0]))])
    assert success(FollowsFirstFeature(), with_test) == 1.0


def test_success_of_a_single_logit() -> None:
    task = on(torch.zeros(2, 2), torch.tensor([[1.0], [0.0]]))
    assert success(nn.Linear(2, 1), task, target=1) in (0.0, 1.0)
    negative = nn.Linear(2, 1)
    nn.init.zeros_(negative.weight)
    nn.init.constant_(negative.bias, -1)
    assert success(negative, task, target=0) == 1.0


def test_a_segmentation_is_refused() -> None:
    task = on(torch.zeros(2, 1, 4, 4), torch.zeros(2, 4, 4).long())
    with pytest.raises(InvalidTask, match="one label per sample"):
        success(nn.Identity(), task)


def test_a_share_of_each_batch_is_poisoned() -> None:
    given: list[Task] = []
    task = replace(TINY, train_data=[(torch.zeros(4, 6), torch.ones(4).long())])
    context = context_of({}, task=task, train=lambda changed: given.append(changed) or {})
    backdoor({}, context, target=2, share=0.25, feature=5)
    [changed] = given
    x, y = split_batch(changed, changed.train_data[0])  # type: ignore[index]
    assert y.tolist() == [2, 1, 1, 1]
    assert x[:, 5].tolist() == [3, 0, 0, 0]


def passive(
    update: dict[str, Tensor], context: Any, target: int = 0, value: float | None = None
) -> dict[str, Tensor]:
    return update


passive.success = success  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("attack", "rule"), [("backdoor", "fedavg"), ("backdoor-search", "lightyear")]
)
def test_the_success_of_a_backdoor_is_a_metric_of_honest_sites(attack: str, rule: str) -> None:
    torch.set_num_threads(1)
    spec = replace(SPEC, rounds=3, rule=RuleConfig(name=rule))
    options = {"target": 2, "value": 6.0}
    with_backdoor = {site: named(attack, **options) for site in COLLUDERS}
    without = {site: named("mine:attack", **options) for site in COLLUDERS}
    attacked = simulate(replace(spec, malfunctions=with_backdoor))
    harmless = simulate(
        replace(spec, malfunctions=without), functions=GivenFunctions(attack=passive)
    )
    for one in COLLUDERS:
        assert ATTACK_SUCCESS not in attacked.sites[one][-1].metrics()
    for site in (A, C):
        first = attacked.sites[site][0]
        # Trained before any poisoned update arrived, and merged with one.
        assert first.local[ATTACK_SUCCESS] == harmless.sites[site][0].local[ATTACK_SUCCESS]
        assert first.merged[ATTACK_SUCCESS] != harmless.sites[site][0].merged[ATTACK_SUCCESS]
    rates = [one.sites[A][-1].merged[ATTACK_SUCCESS] for one in (attacked, harmless)]
    assert rates[0] > rates[1] + 0.2


def test_the_success_is_measured_with_the_model_that_is_served() -> None:
    torch.set_num_threads(1)
    malfunctions = {site: named("backdoor", target=2, value=6.0) for site in COLLUDERS}
    spec = replace(SPEC, rule=RuleConfig(shadow=True), malfunctions=malfunctions)
    for one in (one for site in (A, C) for one in simulate(spec).sites[site]):
        assert one.worth is not None
        serving = one.alone if one.worth.served is Served.ALONE else one.merged
        assert one.served[ATTACK_SUCCESS] == serving[ATTACK_SUCCESS]
        assert 0 <= one.alone[ATTACK_SUCCESS] <= 1


def test_honest_federations_have_no_such_metric() -> None:
    clean = simulate(replace(SPEC, malfunctions={}, rounds=1))
    assert ATTACK_SUCCESS not in clean.sites[A][-1].metrics()
