"""Malfunctions of the user's own: what they see, what they may return, how they are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightyear_node import LightyearError
from lightyear_node import simulate as simulate_from_python
from lightyear_node.config.federation import ExchangeConfig, RuleConfig
from lightyear_node.config.node import TaskConfig
from lightyear_node.errors import ConfigError, TaskFailed
from lightyear_node.lab.acceptance import AcceptanceSpec, measure
from lightyear_node.lab.malfunction_plugins import AttackContext, load_plugin
from lightyear_node.lab.malfunctions import (
    PLUGIN_GROUP,
    MalfunctionConfig,
    is_known,
    known_malfunctions,
)
from lightyear_node.lab.simulate import GivenFunctions, simulate
from lightyear_node.lab.simulation_records import SimulationResult, SimulationSpec
from lightyear_node.types import PeerName
from tests.support import attacks

A, B, C, D = (PeerName(f"site-{letter}") for letter in "abcd")
GIVEN = MalfunctionConfig(kind="mine:attack")
SPEC = SimulationSpec(
    sites=[A, B, C, D],
    rounds=2,
    seed=5,
    rule=RuleConfig(name="fedavg"),
    task=TaskConfig(entry="tests.support.tiny_task:build"),
    malfunctions={B: GIVEN, D: GIVEN},
)
NEGATED = "tests.support.attacks:negated"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def attacked(attack: Callable[..., Any], **changes: Any) -> SimulationResult:
    return simulate(replace(SPEC, **changes), functions=GivenFunctions(attack=attack))


def copied(tensors: Any) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def equal(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Recorder:
    """Sends the negated update; keeps copies of what it saw, by site and round."""

    def __init__(self) -> None:
        self.updates: dict[tuple[str, int], Tensors] = {}
        self.contexts: dict[tuple[str, int], AttackContext] = {}
        self.trained_again: dict[tuple[str, int], Tensors] = {}

    def __call__(self, update: Tensors, context: AttackContext) -> Tensors:
        place = (context.site, context.round)
        self.updates[place] = copied(update)
        self.trained_again[place] = copied(context.train(context.task))
        self.contexts[place] = replace(
            context,
            start=copied(context.start),
            honest={name: copied(one) for name, one in context.honest.items()},
            colluders={name: copied(one) for name, one in context.colluders.items()},
        )
        for tensor in update.values():
            tensor.neg_()
        return update


@pytest.fixture(scope="module")
def recorded() -> Recorder:
    recorder = Recorder()
    attacked(recorder)
    return recorder


def test_an_attack_is_called_once_for_each_attacking_site_and_round(recorded: Recorder) -> None:
    assert sorted(recorded.contexts) == [(site, round) for site in (B, D) for round in (0, 1)]
    assert {context.rounds for context in recorded.contexts.values()} == {2}
    assert len({context.seed for context in recorded.contexts.values()}) == 4


def test_a_common_attack_is_computed_once_in_a_round_and_sent_by_all() -> None:
    called: list[tuple[int, str]] = []

    def attack(update: Tensors, context: AttackContext) -> Tensors:
        called.append((context.round, context.site))
        return {name: tensor + len(called) for name, tensor in update.items()}

    def different_updates(result: SimulationResult) -> list[int]:
        received = [{v.digest for v in one.verdicts if v.peer in (B, D)} for one in result.sites[A]]
        return [len(digests) for digests in received]

    assert different_updates(attacked(attack)) == [2, 2]
    called.clear()
    attack.common = True  # type: ignore[attr-defined]
    assert different_updates(attacked(attack)) == [1, 1]
    assert called == [(0, B), (1, B)]


def test_an_attack_sees_honest_sites_and_the_honest_updates_of_colluders(
    recorded: Recorder,
) -> None:
    for (site, round), context in recorded.contexts.items():
        other = D if site == B else B
        assert set(context.honest) == {A, C}
        # What the colluder trained, although one of the two has sent its attack before.
        assert set(context.colluders) == {other}
        assert equal(context.colluders[other], recorded.updates[other, round])
    by_b, by_d = recorded.contexts[B, 1], recorded.contexts[D, 1]
    assert all(equal(by_b.honest[name], by_d.honest[name]) for name in (A, C))
    assert not equal(by_b.honest[A], by_b.honest[C])


def test_the_start_is_the_common_model_and_later_the_merged_one(recorded: Recorder) -> None:
    starts = {place: context.start for place, context in recorded.contexts.items()}
    assert equal(starts[B, 0], starts[D, 0])
    # FedAvg of own update, two honest ones and the other's negated one, with equal samples.
    name = "0.weight"
    honest = recorded.contexts[B, 0].honest
    total = recorded.updates[B, 0][name] + honest[A][name] + honest[C][name]
    mean = (total - recorded.updates[D, 0][name]) / 4
    torch.testing.assert_close(starts[B, 1][name], mean)


def test_training_the_unchanged_task_gives_the_honest_update(recorded: Recorder) -> None:
    """In the second round the optimizer has a state, which must be that before the round."""
    for place, update in recorded.updates.items():
        assert equal(recorded.trained_again[place], update), place


def test_an_attack_that_returns_its_update_changes_nothing() -> None:
    assert (
        attacked(lambda update, context: update).sites
        == simulate(replace(SPEC, malfunctions={})).sites
    )


def test_with_a_shorter_type_an_attack_is_rounded_like_any_update() -> None:
    seen: list[Tensor] = []

    def attack(update: Tensors, context: AttackContext) -> Tensors:
        seen.append(context.honest[A]["0.weight"])
        return update

    short = ExchangeConfig(dtype="bfloat16")
    result = attacked(attack, exchange=short)
    assert result.sites == simulate(replace(SPEC, exchange=short, malfunctions={})).sites
    assert all(torch.equal(one, one.bfloat16().float()) for one in seen)


def test_random_numbers_of_an_attack_repeat_and_leave_the_training_alone() -> None:
    def noise(update: Tensors, context: AttackContext) -> Tensors:
        return {name: tensor + torch.randn_like(tensor) for name, tensor in update.items()}

    first, second = attacked(noise), attacked(noise)
    assert first == second
    honest = simulate(replace(SPEC, malfunctions={}))
    # Nothing is merged before the end of round 0: the trained models are those without attack.
    for name in SPEC.sites:
        assert first.sites[name][0].local == honest.sites[name][0].local
    assert first.sites[A][0].merged != honest.sites[A][0].merged


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda u: None, "returned a NoneType, not tensors by name"),
        (lambda u: list(u.values()), "returned a list, not tensors by name"),
        (
            lambda u: {n: t.numpy() for n, t in u.items()},
            "returned a ndarray as '.*', not",
        ),
        (lambda u: {n: t for n, t in u.items() if n != "3.bias"}, "returned no tensor '3.bias'"),
        (lambda u: {**u, "extra": torch.zeros(1)}, "a tensor 'extra', which the update does not"),
        (lambda u: {**u, "3.bias": torch.zeros(4)}, r"3.bias is torch.float32 \(4,\)"),
        (lambda u: {**u, "3.bias": u["3.bias"].double()}, "3.bias is torch.float64"),
        (lambda u: u["4.bias"], "raised KeyError: '4.bias'"),
    ],
)
def test_a_wrong_answer_is_an_error_that_names_the_attack(
    answer: Callable[[Tensors], Any], words: str
) -> None:
    with pytest.raises(TaskFailed, match=f"malfunction mine:attack .*{words}") as caught:
        attacked(lambda update, context: answer(update), rounds=1)
    assert "docs/own-attack.md" in (caught.value.hint or "")


def test_an_error_of_the_changed_task_names_the_attack() -> None:
    def attack(update: Tensors, context: AttackContext) -> Tensors:
        return context.train(replace(context.task, train_data=[torch.zeros(3)]))

    with pytest.raises(TaskFailed, match="malfunction mine:attack: a batch is a Tensor"):
        attacked(attack, rounds=1)


def test_tensors_that_are_not_finite_or_need_a_gradient_are_sent() -> None:
    def attack(update: Tensors, context: AttackContext) -> Tensors:
        return {n: (t * torch.nan).requires_grad_() for n, t in update.items()}

    verdicts = attacked(attack, rule=RuleConfig(), rounds=1).sites[A][0].verdicts
    assert {v.peer: str(v.reason) for v in verdicts if not v.accepted}.items() >= {
        (B, "nonfinite"),
        (D, "nonfinite"),
    }


@pytest.mark.parametrize(
    ("malfunction", "words"),
    [
        ({"kind": "there.is.none:attack"}, "none:attack cannot be imported: ModuleNotFoundError"),
        ({"kind": "tests.support.attacks:none"}, "attacks:none cannot be imported: Attribute"),
        ({"kind": "tests.support.paths:ROOT"}, "paths:ROOT is not a function"),
        ({"kind": "os:getcwd"}, r"os:getcwd does not take \(update, context\)"),
        ({"kind": NEGATED, "options": {"factr": 1}}, "attacks:negated has no option `factr`"),
        ({"kind": NEGATED, "scale": 2.0}, "attacks:negated has no option `scale`"),
    ],
)
def test_an_unusable_function_is_refused_before_training(
    malfunction: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_plugin(MalfunctionConfig(**malfunction))
    spec = replace(SPEC, malfunctions={B: MalfunctionConfig(**malfunction)})
    steps: list[int] = []
    with pytest.raises(ConfigError, match=words):
        simulate(spec, lambda done, total: steps.append(done))
    assert steps == []


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda update: update, "does not take"),
        (lambda *, update, context: update, "does not take"),
        (lambda update, context, needed: update, "`needed` is no option"),
    ],
)
def test_a_function_with_another_signature_is_refused(function: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"malfunction mine:attack.*{words}"):
        load_plugin(GIVEN, function)


def test_options_and_scale_are_passed_by_name() -> None:
    def attack(update: Any, context: Any, scale: float = 0.0, **more: Any) -> Any: ...

    config = MalfunctionConfig(kind="mine:attack", scale=2.0, options={"depth": 3})
    assert load_plugin(config, attack).options == {"scale": 2.0, "depth": 3}


def test_only_own_malfunctions_have_options_and_old_keys_stay_valid() -> None:
    with pytest.raises(ConfigError, match="malfunction sfa has no option `factor`"):
        MalfunctionConfig(kind="sfa", options={"factor": 1}).checked()
    assert MalfunctionConfig(kind="sfa").model_dump() == {"kind": "sfa", "scale": None}
    own = MalfunctionConfig(kind=NEGATED, options={"factor": 2.0})
    assert own.checked().model_dump()["options"] == {"factor": 2.0}
    assert MalfunctionConfig.model_validate_json(own.model_dump_json()) == own


class TestSuccess:
    """An attack may have a function that measures its success."""

    @staticmethod
    def with_success(measure: Any, **options: Any) -> SimulationResult:
        def attack(update: Tensors, context: AttackContext, target: int = 0) -> Tensors:
            return update

        attack.success = measure  # type: ignore[attr-defined]
        config = MalfunctionConfig(kind="mine:attack", options=options)
        return attacked(attack, rounds=1, malfunctions={B: config, D: config})

    def test_it_is_a_metric_of_honest_sites_after_training_and_after_merging(self) -> None:
        seen: list[tuple[Any, bool]] = []

        def measure(model: Any, task: Any) -> float:
            seen.append((task, model.training))
            return len(seen) / 8

        result = self.with_success(measure)
        values = [result.sites[site][0].metrics() for site in (A, C)]
        found = [one[f"{part}.attack_success"] for one in values for part in ("local", "merged")]
        assert sorted(found) == [1 / 8, 2 / 8, 3 / 8, 4 / 8]
        assert not any(training for _, training in seen)
        for site in (B, D):
            assert not any("attack_success" in name for name in result.sites[site][0].metrics())

    def test_it_gets_the_options_that_it_has_parameters_for(self) -> None:
        given = self.with_success(lambda model, task, target=5: target, target=2)
        assert given.sites[A][0].merged["attack_success"] == 2
        default = self.with_success(lambda model, task, target=5: target)
        assert default.sites[A][0].merged["attack_success"] == 5
        assert self.with_success(lambda model, task: 1, target=2).sites[A][0].merged["accuracy"] > 0

    @pytest.mark.parametrize("measure", [lambda model, task: 1 / 0, 3, lambda model, task: "much"])
    def test_an_error_in_it_names_the_attack(self, measure: Any) -> None:
        with pytest.raises(TaskFailed, match="malfunction mine:attack: its `success` raised"):
            self.with_success(measure)


class TestInstalled:
    @pytest.fixture
    def install(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        def install_package(package: str, **points: str) -> None:
            metadata = tmp_path / package / f"{package}-0.1.dist-info"
            metadata.mkdir(parents=True)
            (metadata / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n"
            )
            lines = [f"{name} = {value}" for name, value in points.items()]
            text = "\n".join([f"[{PLUGIN_GROUP}]", *lines, ""])
            (metadata / "entry_points.txt").write_text(text)
            monkeypatch.syspath_prepend(str(tmp_path / package))

        return install_package

    def test_an_entry_point_gives_an_attack_a_name(self, install: Callable[..., None]) -> None:
        assert not is_known("mirror")
        install("mirrors", mirror=NEGATED)
        assert known_malfunctions()[-1] == "mirror"
        named = MalfunctionConfig(kind="mirror", options={"factor": 2.0}).checked()
        plugin = load_plugin(named)
        assert plugin.function is attacks.negated
        by_name = simulate(replace(SPEC, malfunctions={B: named}))
        path = MalfunctionConfig(kind=NEGATED, options={"factor": 2.0})
        by_path = simulate(replace(SPEC, malfunctions={B: path}))
        assert str(by_name) == str(by_path)  # as text: NaN differs from itself

    def test_two_packages_with_one_name_are_refused(self, install: Callable[..., None]) -> None:
        install("one", mirror=NEGATED)
        install("two", mirror="tests.support.attacks:broken")
        with pytest.raises(ConfigError, match='two packages offer a malfunction "mirror"'):
            load_plugin(MalfunctionConfig(kind="mirror"))

    def test_a_package_cannot_replace_a_built_in_malfunction(
        self, install: Callable[..., None]
    ) -> None:
        install("shadow", sfa=NEGATED, alie=NEGATED)
        for name in ("sfa", "alie"):
            with pytest.raises(ConfigError, match=f"`{name}`, which is built in"):
                MalfunctionConfig(kind=name).checked()
        MalfunctionConfig(kind="ana").checked()
        MalfunctionConfig(kind="ipm").checked()


SMALL: dict[str, Any] = {
    "task": "tests.support.tiny_task:build", "sites": 3, "rounds": 2, "rule": "fedavg",
}  # fmt: skip


class TestFromPython:
    def test_a_function_and_its_name_give_the_same_records(self) -> None:
        options = {"factor": 2.0}
        by_name = simulate_from_python(**SMALL, malfunction=NEGATED, malfunction_options=options)
        torch.manual_seed(1)
        torch.set_num_threads(2)
        generator = torch.get_rng_state()
        try:
            by_function = simulate_from_python(
                **SMALL, malfunction=attacks.negated, malfunction_options=options
            )
            assert torch.get_num_threads() == 2
        finally:
            torch.set_num_threads(1)
        assert str(by_function) == str(by_name)  # as text: NaN differs from itself
        assert torch.equal(torch.get_rng_state(), generator)
        assert float(torch.tensor(1e-30) * 1e-10) > 0  # denormal numbers are flushed no longer

    def test_a_task_may_be_a_function(self) -> None:
        from tests.support.tiny_task import build

        given = {**SMALL, "task": build}
        by_function, by_name = simulate_from_python(**given), simulate_from_python(**SMALL)
        assert str(by_function) == str(by_name)

    def test_a_rule_may_be_a_function(self) -> None:
        def equal_shares(own: Any, peers: Any, validation: Any, context: Any, *, most=9) -> Any:
            return {peer.peer: 1 / (len(peers) + 1) for peer in peers[:most]}

        averaged = simulate_from_python(**SMALL, malfunction="none")
        records = simulate_from_python(**{**SMALL, "rule": equal_shares}, malfunction="none")
        # All sites have as many samples, so that FedAvg gives equal shares, too.
        assert records == averaged
        some = simulate_from_python(
            **{**SMALL, "rule": equal_shares}, options={"most": 1}, malfunction="none"
        )
        assert {one["accepted"] for one in some if one["kind"] == "round"} == {1}
        for options, words in (({"mots": 1}, '"mots"'), ({"most": "x"}, "'x', not an int")):
            with pytest.raises(LightyearError, match=f"rule .*equal_shares.*{words}"):
                simulate_from_python(**{**SMALL, "rule": equal_shares}, options=options)
        with pytest.raises(LightyearError, match=r"rule .*equal_shares.*an option is a number"):
            simulate_from_python(**{**SMALL, "rule": equal_shares}, options={"most": []})
        with pytest.raises(LightyearError, match=r"rule .*lambda: .*does not take"):
            simulate_from_python(**{**SMALL, "rule": lambda own: {}})

    def test_errors_name_the_function(self) -> None:
        with pytest.raises(LightyearError, match=r"attacks:broken raised RuntimeError: the attack"):
            simulate_from_python(**SMALL, malfunction=attacks.broken)
        with pytest.raises(LightyearError, match=r"attacks:broken raised RuntimeError: the attack"):
            simulate_from_python(**SMALL, malfunction="tests.support.attacks:broken")
        with pytest.raises(LightyearError, match="lambda raised ZeroDivisionError"):
            simulate_from_python(**SMALL, malfunction=lambda update, context: 1 / 0)


def test_acceptance_judges_an_attack_that_saw_the_honest_updates() -> None:
    config = MalfunctionConfig(kind=NEGATED, options={"factor": 2.0})
    spec = AcceptanceSpec([A, B, C], [1], 5, [config], SPEC.task)
    rows = [row for row in measure(spec) if row["malfunction"] != "none"]
    assert {row["malfunction"] for row in rows} == {f"{NEGATED} factor=2.0"}
    assert len(rows) == 6
    assert not any(row["guard"] for row in rows)
