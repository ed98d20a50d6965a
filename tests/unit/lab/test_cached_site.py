"""Simulations give the same results whether they train or take what was trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.config.federation import ExchangeConfig, RuleConfig
from lightyear_node.config.node import TaskConfig
from lightyear_node.lab.federation import site_names
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.lab.simulate import GivenFunctions, simulate
from lightyear_node.lab.simulation_records import SimulationSpec
from lightyear_node.lab.tasks import digits
from lightyear_node.lab.training_cache import CacheSettings

pytest.importorskip("sklearn")

NAMES = site_names(3)
BAD = NAMES[-1]
SPEC = SimulationSpec(
    sites=NAMES,
    rounds=3,
    seed=7,
    rule=RuleConfig(),
    task=TaskConfig(args={"epochs": 1, "batch_size": 64}),
)
RULES = (
    RuleConfig(name="local"),
    RuleConfig(name="fedavg"),
    RuleConfig(name="krum", options={"faulty": 1}),
    RuleConfig(guard=False),
    RuleConfig(),
    RuleConfig(shadow=True),
    RuleConfig(name="fedprox"),
    RuleConfig(name="ditto"),
)
MALFUNCTIONS = ("sfa", "dynamic", "label-flip", "stale", "alie", "backdoor")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def cache(tmp_path: Path) -> CacheSettings:
    return CacheSettings(str(tmp_path / "cache"), 1 << 30, {}, {})


def under(kind: str, spec: SimulationSpec = SPEC) -> SimulationSpec:
    return replace(spec, malfunctions={BAD: MalfunctionConfig(kind=kind)})


def numbers(spec: SimulationSpec, cache: CacheSettings | None = None) -> tuple[str, int]:
    """Everything that a simulation answers, and how many trainings came from the cache."""
    result = simulate(spec, cache=cache)
    assert result.trainings == sum(one.takes_part for r in result.sites.values() for one in r)
    return json.dumps(replace(result, cached=0).to_plain()), result.cached


def check(specs: list[SimulationSpec], cache: CacheSettings) -> list[int]:
    """Compare with simulations that train; return how much came from the cache."""
    counts = []
    for spec in specs:
        found, count = numbers(spec, cache)
        assert found == numbers(spec)[0], spec.rule
        counts.append(count)
    return counts


def test_an_equal_simulation_trains_nothing(cache: CacheSettings) -> None:
    short = replace(SPEC, rounds=2)
    counts = check([under("label-flip", short), under("label-flip", short)], cache)
    assert counts == [0, 6]


def test_rules_and_malfunctions_share_what_they_train_alike(cache: CacheSettings) -> None:
    fedavg = replace(SPEC, rule=RuleConfig(name="fedavg"), rounds=2)
    first, flipped, other = check([fedavg, under("sfa", fedavg), under("ana", fedavg)], cache)
    assert first == 0
    # The first round; in the second the bad site, which got honest models.
    assert flipped == other == 3 + 1


def test_training_that_a_rule_changes_is_its_own(cache: CacheSettings) -> None:
    specs = [replace(SPEC, rounds=1, rule=rule) for rule in (*RULES[4:], RULES[1])]
    assert check(specs, cache) == [0, 0, 0, 0, 3]
    assert check([replace(spec, seed=8) for spec in specs[:1]], cache) == [0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"exchange": ExchangeConfig(dtype="bfloat16")},
        {"final_only": True},
        {"participation": 0.5, "rounds": 4},
    ],
)
def test_other_settings_give_the_same_results(
    cache: CacheSettings, changes: Mapping[str, Any]
) -> None:
    spec = replace(under("stale"), **changes)
    first, second = check([spec, spec], cache)
    assert first == 0
    assert second > 5


def test_metrics_are_not_taken_from_a_training_without_them(cache: CacheSettings) -> None:
    specs = [replace(SPEC, final_only=True, rounds=2), replace(SPEC, rounds=2)]
    # Only the last round of the first was measured.
    assert check(specs, cache) == [0, 3]


def test_the_success_of_an_attack_is_not_taken_from_another(cache: CacheSettings) -> None:
    plain = replace(SPEC, rounds=1, rule=RuleConfig(name="fedavg"))
    options = {BAD: MalfunctionConfig(kind="backdoor", options={"target": 3})}
    specs = [plain, under("backdoor", plain), replace(plain, malfunctions=options)]
    assert check(specs, cache) == [0, 1, 1]  # the bad site does not measure it


def test_functions_that_have_no_name_are_never_cached(cache: CacheSettings) -> None:
    def build(site_index: int, site_count: int, seed: int) -> Any:
        return digits.build(site_index, site_count, seed, epochs=1, batch_size=64)

    spec = replace(SPEC, rounds=1, task=TaskConfig())
    for _ in range(2):
        assert simulate(spec, functions=GivenFunctions(task=build), cache=cache).cached == 0
    assert simulate(replace(spec, task=SPEC.task), cache=cache).cached == 0


def test_a_damaged_cache_changes_no_result(cache: CacheSettings) -> None:
    spec = replace(SPEC, rounds=1)
    check([spec], cache)
    for number, path in enumerate(sorted(Path(cache.folder).iterdir())):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // (number + 2)])
    assert check([spec, spec], cache) == [0, 3]


@pytest.mark.slow
def test_every_rule_and_malfunction_gives_the_same_results(cache: CacheSettings) -> None:
    specs = [
        under(kind, replace(SPEC, rule=rule)) if kind else replace(SPEC, rule=rule)
        for rule in RULES
        for kind in (None, *MALFUNCTIONS)
    ]
    counts = check(specs, cache)
    assert sum(counts) > len(specs) * 9 // 2
