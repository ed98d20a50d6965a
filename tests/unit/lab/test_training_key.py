"""The key of a training changes with everything that changes its result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from lightyear_node.config.federation import ExchangeConfig, RuleConfig
from lightyear_node.config.node import TaskConfig
from lightyear_node.lab.federation import site_names
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.lab.partition import PartitionConfig
from lightyear_node.lab.simulation_records import SimulationSpec
from lightyear_node.lab.tasks import BUILT_IN
from lightyear_node.lab.training_key import (
    is_keyed,
    machine_inputs,
    package_inputs,
    site_inputs,
    training_key,
)
from lightyear_node.types import Digest

NAMES = site_names(3)
FEMNIST = TaskConfig(entry=BUILT_IN["femnist"].entry, args={"network": "small"})
DATA = {"femnist/femnist.npz": "1" * 64, "heart_disease/heart_disease.npz": "2" * 64}
SPEC = SimulationSpec(sites=NAMES, rounds=2, seed=7, rule=RuleConfig(), task=FEMNIST)
ROUND: dict[str, Any] = {
    "round": 1,
    "base": Digest("a" * 64),
    "carry": Digest("b" * 64),
    "proximal": 0.0,
    "personal": 0.0,
    "shadow": False,
    "device": "cpu",
    "measure": True,
}


def key_of(spec: SimulationSpec = SPEC, name: str = NAMES[0], **changes: Any) -> Digest:
    given: Mapping[str, Any] = {"data": DATA, "success": None, **changes}
    inputs = site_inputs(spec, name, given["data"], given["success"])  # type: ignore[arg-type]
    return training_key(inputs, **ROUND)


@pytest.mark.parametrize(
    "changed",
    [
        {"round": 2},
        {"base": Digest("c" * 64)},
        {"carry": Digest("c" * 64)},
        {"carry": None},
        {"proximal": 0.1},
        {"personal": 0.1},
        {"shadow": True},
        {"device": "cuda"},
        {"measure": False},
    ],
)
def test_the_key_covers_what_a_round_begins_with(changed: dict[str, Any]) -> None:
    assert training_key({"a": 1}, **ROUND) != training_key({"a": 1}, **{**ROUND, **changed})
    assert training_key({"a": 1}, **ROUND) != training_key({"a": 2}, **ROUND)


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 8},
        {"sites": site_names(4)},
        {"task": TaskConfig(entry=FEMNIST.entry, args={"network": "paper"})},
        {"task": TaskConfig(entry=BUILT_IN["digits"].entry, args={"network": "small"})},
        {"partition": PartitionConfig(kind="iid")},
        {"partition": PartitionConfig(kind="iid", seed=1)},
        {"exchange": ExchangeConfig(exclude=("*.bias",))},
    ],
)
def test_the_key_covers_task_data_and_site(changed: dict[str, Any]) -> None:
    assert key_of(replace(SPEC, **changed)) != key_of()
    assert key_of(name=NAMES[1]) != key_of()
    assert key_of(data={**DATA, "femnist/femnist.npz": "3" * 64}) != key_of()
    assert key_of(success={"name": "backdoor"}) != key_of()


def test_jobs_that_train_alike_have_the_same_key() -> None:
    """Rule, malfunctions, participation and length act on what was trained, or when."""
    flipped = {NAMES[-1]: MalfunctionConfig(kind="sfa")}
    other = replace(
        SPEC, rule=RuleConfig(name="krum"), malfunctions=flipped, rounds=9, participation=0.5
    )
    assert key_of(other) == key_of()
    assert key_of(data={"femnist/femnist.npz": "1" * 64}) == key_of()
    assert key_of(replace(SPEC, sites=NAMES[::-1])) == key_of()


def test_only_training_whose_inputs_are_known_is_keyed() -> None:
    assert is_keyed(SPEC, DATA)
    assert is_keyed(replace(SPEC, task=TaskConfig()), {})
    for kind, known in {"label-flip": True, "alie": True, "my_attacks:mine": False}.items():
        spec = replace(SPEC, malfunctions={NAMES[0]: MalfunctionConfig(kind=kind)})
        assert is_keyed(spec, DATA) is known
    assert not is_keyed(SPEC, {})  # the data are not known
    for task in (
        TaskConfig(entry="my_tasks:build"),
        TaskConfig(script="train.py"),
        TaskConfig(entry=FEMNIST.entry, args={"data": "elsewhere"}),
    ):
        assert not is_keyed(replace(SPEC, task=task), DATA)


def test_code_versions_and_settings_of_torch_are_plain_values() -> None:
    import torch

    package, machine = package_inputs(), machine_inputs()
    assert package == package_inputs() == json.loads(json.dumps(package))
    assert machine == json.loads(json.dumps(machine))
    assert package["versions"]["torch"]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert machine_inputs() != machine
    finally:
        torch.set_num_threads(threads)
