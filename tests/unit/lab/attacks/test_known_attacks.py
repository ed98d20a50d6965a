"""All known attacks: names, layout, determinism, common messages, limits, options."""

from __future__ import annotations

import pytest
import torch

from lightyear_node.errors import ConfigError, TaskFailed
from lightyear_node.lab.acceptance import AcceptanceSpec, measure
from lightyear_node.lab.malfunction_plugins import load_plugin
from lightyear_node.lab.malfunctions import ATTACKS, MALFUNCTIONS, known_malfunctions
from lightyear_node.lab.suite import ExperimentGrid
from lightyear_node.learning.guard import DistanceLimits, soundness
from lightyear_node.types import Reason
from tests.support.recorded_attacks import (
    COLLUDERS,
    SPEC,
    A,
    AttackRecorder,
    B,
    C,
    D,
    context_of,
    equal,
    named,
    recorded,
)

ROUNDS = range(SPEC.rounds)
COMMON = ("alie", "min-max", "min-sum", "adaptive-grey", "adaptive-white", "overfit-v")
NEAR = (
    "boiling-frog", "backdoor-search", "adaptive-grey", "adaptive-white", "overfit-v",
)  # fmt: skip
BAD_OPTIONS = {
    "alie": ({"z": "much"}, "option z is 'much', not a number"),
    "ipm": ({"epsilon": 0}, "option epsilon is 0, not above 0"),
    "min-max": ({"direction": "up"}, "option direction is 'up'"),
    "min-sum": ({"direction": 1}, "option direction is 1"),
    "clipped-bias": ({"target": 3}, "option target is 3, but there are 3 classes"),
    "layer-swap": ({"layer": "9"}, "no weight of a layer '9'"),
    "rescale": ({"factor": -1.0}, "option factor is -1.0, not above 0"),
    "targeted-flip": ({"source": 2, "target": 2}, "options source and target are both 2"),
    "boiling-frog": ({"victim": "site-b"}, "option victim is 'site-b', which is no honest site"),
    "sybil": ({"steps": 0}, "option steps is 0, not a whole number of at least 1"),
    "backdoor": ({"share": 1.5}, "option share is 1.5, not above 0 and at most 1"),
    "backdoor-search": ({"feature": 6}, "option feature is 6, but there are 6 features"),
    "adaptive-grey": ({"rate": True}, "option rate is True, not a number"),
    "adaptive-white": ({"steps": 1.5}, "option steps is 1.5, not a whole number"),
    "sleeper": ({"awake": 0}, "option awake is 0, not a whole number of at least 1"),
    "overfit-v": ({"spoil": -1}, "option spoil is -1, which is below 0"),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def recorder() -> AttackRecorder:
    awake = {"sleeper": named("sleeper", awake=SPEC.rounds)}
    return recorded({name: named(name) for name in ATTACKS} | awake)


def test_every_attack_is_a_known_function_with_options_and_no_built_in_malfunction() -> None:
    assert known_malfunctions()[: len(MALFUNCTIONS) + len(ATTACKS)] == (*MALFUNCTIONS, *ATTACKS)
    for name in ATTACKS:
        assert not named(name).built_in
        assert load_plugin(named(name)).name == name
        with pytest.raises(ConfigError, match=f"malfunction {name} has no option `sscale`"):
            load_plugin(named(name, sscale=1))


def test_a_suite_names_attacks_like_other_malfunctions() -> None:
    listed = ["none", "sfa", "alie", {"kind": "ipm", "options": {"epsilon": 0.5}}]
    grid = ExperimentGrid.model_validate(
        {"name": "g", "task": "digits", "rules": ["fedavg"], "malfunctions": listed, "bad": [1]}
    )
    assert [one.kind for one in grid.malfunctions] == ["none", "sfa", "alie", "ipm"]


def test_every_attack_gives_a_sound_message_and_repeats_it(recorder: AttackRecorder) -> None:
    assert recorder.errors == {}
    assert recorder.unequal == []
    for seen in recorder.seen.values():
        for name, message in seen.messages.items():
            assert soundness(message) is Reason.OK, name
            assert not equal(message, seen.update), name


@pytest.mark.parametrize("attack", COMMON)
def test_colluders_send_one_common_message(recorder: AttackRecorder, attack: str) -> None:
    for round in ROUNDS:
        first, second = (recorder.seen[site, round].messages[attack] for site in COLLUDERS)
        assert equal(first, second)


def test_sybils_add_one_common_step(recorder: AttackRecorder) -> None:
    for round in ROUNDS:
        first, second = (recorder.seen[site, round] for site in COLLUDERS)
        for name, sent in first.messages["sybil"].items():
            other = second.messages["sybil"][name] - second.update[name]
            torch.testing.assert_close(sent - first.update[name], other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("attack", NEAR)
def test_messages_stay_within_the_distance_limit(recorder: AttackRecorder, attack: str) -> None:
    for (_, round), seen in recorder.seen.items():
        victim = seen.context.honest[A]
        limits = DistanceLimits.of(victim, seen.context.start if round == 0 else None)
        used = limits.farthest(victim, seen.messages[attack]).share
        assert 0 < used <= 0.951


def test_an_attack_sees_the_tasks_of_honest_sites_and_of_colluders(
    recorder: AttackRecorder,
) -> None:
    by_b, by_d = (recorder.seen[site, 0].context for site in COLLUDERS)
    assert set(by_b.victims) == {A, C}
    assert set(by_b.partners) == {D}
    assert set(by_d.partners) == {B}
    assert by_b.partners[D] is by_d.task
    assert by_b.victims[A] is by_d.victims[A]


@pytest.fixture(scope="module")
def refused() -> AttackRecorder:
    wrong = {name: named(name, **options) for name, (options, _) in BAD_OPTIONS.items()}
    return recorded(wrong, rounds=1)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_wrong_option_is_an_error_that_names_it(refused: AttackRecorder, attack: str) -> None:
    error = refused.errors[attack]
    assert isinstance(error, TaskFailed)
    assert f"malfunction {attack}: " in str(error)
    assert BAD_OPTIONS[attack][1] in str(error)


def test_the_option_victim_chooses_another_site() -> None:
    by_victim = recorded(
        {
            "first": named("boiling-frog"),
            "a": named("boiling-frog", victim=A),
            "c": named("boiling-frog", victim=C),
        },
        rounds=1,
    )
    messages = by_victim.seen[B, 0].messages
    assert equal(messages["first"], messages["a"])
    assert not equal(messages["a"], messages["c"])
    victim = by_victim.seen[B, 0].context.honest[C]
    limits = DistanceLimits.of(victim, by_victim.seen[B, 0].context.start)
    assert limits.farthest(victim, messages["c"]).share == pytest.approx(0.95 * 0.1, abs=1e-4)


@pytest.mark.parametrize(
    "attack", ["clipped-bias", "boiling-frog", "adaptive-grey", "adaptive-white", "overfit-v"]
)
def test_without_an_honest_site_the_honest_update_is_sent(
    recorder: AttackRecorder, attack: str
) -> None:
    update = recorder.seen[B, 0].update
    assert equal(load_plugin(named(attack)).function(update, context_of(update)), update)


def test_the_victims_data_must_be_known_to_use_them(recorder: AttackRecorder) -> None:
    seen = recorder.seen[B, 0]
    context = context_of(seen.update, honest=seen.context.honest)
    for attack in ("adaptive-white", "overfit-v"):
        with pytest.raises(TaskFailed, match="the victim's validation data is not known"):
            load_plugin(named(attack)).function(seen.update, context)


def test_acceptance_lets_attacks_know_the_judges_data() -> None:
    kinds = [named("adaptive-white", steps=2), named("alie")]
    rows = measure(AcceptanceSpec([A, B, C], [1], 5, kinds, SPEC.task))
    by_first = [row for row in rows if row["malfunction"] == "adaptive-white steps=2"]
    assert {row["guard"] for row in by_first if row["judge"] == A} == {True}
    assert sum(row["malfunction"] == "alie" for row in rows) == 6
