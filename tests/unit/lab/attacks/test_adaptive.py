"""Adaptive attacks in closed loops: the guard accepts their messages, and they do harm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightyear_node.config.federation import RuleConfig
from lightyear_node.lab.attacks.victim import GuardEstimate, choose_victim
from lightyear_node.lab.simulate import simulate
from lightyear_node.lab.simulation_records import SimulationResult
from lightyear_node.types import Served
from lightyear_node.worker.task import Task
from tests.support.recorded_attacks import SPEC, A, B, C, D, named, network_with, recorded

ALL_BUT_ONE = (B, C, D)
HARDER = replace(
    SPEC,
    rounds=3,
    task=SPEC.task.model_copy(update={"args": {"samples": 40}}),
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def attacked(kind: str | None, **options: Any) -> SimulationResult:
    malfunctions = {site: named(kind, **options) for site in ALL_BUT_ONE} if kind else {}
    return simulate(replace(HARDER, malfunctions=malfunctions))


@pytest.fixture(scope="module")
def clean() -> SimulationResult:
    return attacked(None)


@pytest.mark.parametrize("kind", ["adaptive-white", "adaptive-grey"])
def test_the_victim_accepts_and_merges_messages_that_raise_its_loss(
    clean: SimulationResult, kind: str
) -> None:
    rounds = attacked(kind).sites[A]
    for one in rounds:
        assert [str(verdict.reason) for verdict in one.verdicts] == ["ok"] * 3
        assert one.harm is not None
        if kind == "adaptive-white":
            assert one.harm.dropped == ()
    last, honest = rounds[-1], clean.sites[A][-1]
    assert last.merged["loss"] > 1.2 * honest.merged["loss"]
    if kind == "adaptive-white":  # only it knows which decisions the victim compares
        assert last.merged["loss"] > last.local["loss"]


def test_a_sleeper_is_honest_until_the_last_rounds(clean: SimulationResult) -> None:
    rounds, honest = attacked("sleeper").sites[A], clean.sites[A]
    assert [one.merged for one in rounds[:-1]] == [one.merged for one in honest[:-1]]
    assert rounds[-1].merged["loss"] > 1.02 * honest[-1].merged["loss"]


@pytest.mark.parametrize("kind", ["adaptive-grey", "sleeper", "label-flip"])
def test_a_site_with_a_shadow_does_not_serve_what_harms_it(kind: str) -> None:
    """The sleeper knows that good rounds count for a while."""
    spec = replace(HARDER, rounds=6, rule=RuleConfig(shadow=True, harm_max=False))
    malfunctions = {site: named(kind) for site in ALL_BUT_ONE}
    last = simulate(replace(spec, malfunctions=malfunctions)).sites[A][-1]
    assert last.worth is not None
    assert last.served["accuracy"] >= last.alone["accuracy"]
    if last.merged["accuracy"] < last.alone["accuracy"]:
        assert last.worth.served is Served.ALONE


def test_a_site_with_a_shadow_serves_what_helps_it() -> None:
    few = SPEC.task.model_copy(update={"args": {"samples": 20}})
    rule = RuleConfig(shadow=True)
    sites = simulate(replace(SPEC, rounds=6, seed=1, rule=rule, task=few, malfunctions={})).sites
    merged, alone, served = (
        sum(getattr(rounds[-1], which)["accuracy"] for rounds in sites.values())
        for which in ("merged", "alone", "served")
    )
    assert merged > alone
    assert served >= alone + 0.5 * (merged - alone)


def test_the_estimated_guard_is_that_of_the_victim() -> None:
    recorder = recorded({"white": named("adaptive-white")})
    for (_, round), seen in recorder.seen.items():
        victim = choose_victim(seen.context)
        assert victim is not None
        assert victim.name == A
        guard = GuardEstimate(victim, [seen.context.victims[A]], round, 2)
        message = seen.messages["white"]
        assert guard.accepts(message)
        assert not guard.accepts({name: -tensor for name, tensor in message.items()})

        task = seen.context.victims[A]
        assert loss(task, guard.merged(message), task) > loss(task, victim.update, task)


@torch.no_grad()
def loss(task: Task, weights: Mapping[str, Tensor], data: Task) -> float:
    """The loss of a model on the validation data of another task."""
    model = network_with(task, weights)
    return sum(float(task.loss(model(x), y)) for x, y in data.val_data)


def test_a_message_that_overfits_the_validation_data_lowers_the_loss_there_only() -> None:
    recorder = recorded({"overfit": named("overfit-v", spoil=1.0)}, task=HARDER.task)
    seen = recorder.seen[B, 1]
    own, other = seen.context.victims[A], seen.context.victims[C]
    before, after = seen.context.honest[A], seen.messages["overfit"]
    assert loss(own, after, own) < loss(own, before, own)
    assert loss(own, after, other) > loss(own, before, other)
