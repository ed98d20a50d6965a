"""User rules: found by entry point and validated; the documented examples run as written."""

from __future__ import annotations

import math
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightyear_node.errors import ConfigError, TaskFailed
from lightyear_node.lab.corrupted_updates import corrupt
from lightyear_node.learning import Candidate, Validation, make_rule
from lightyear_node.learning.rules import (
    FunctionRule,
    Judgement,
    RoundContext,
    rule_names,
    rule_options,
)
from lightyear_node.types import Digest, PeerName, Reason, Round, Verdict
from tests.support.installed_package import install_package
from tests.support.paths import DOCS

PAGE = DOCS / "own-rule.md"
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a package into a directory on the path."""

    def install_on_path(package: str, module: str, source: str, points: dict[str, str]) -> None:
        folder = tmp_path / package
        install_package(folder, module, source, points, package=package)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, module, raising=False)

    return install_on_path


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_documented_rule_works_as_written(install: Install, digits: Any) -> None:
    project = tomllib.loads(blocks("toml")[0])["project"]
    points = project["entry-points"]["lightyear_node.rules"]
    assert blocks("python")[0].startswith("# my_rules.py\n")
    install(project["name"], "my_rules", blocks("python")[0], points)
    assert rule_names()[-1] == "my_rule"
    assert rule_options("my_rule") == {"slack": "float"}

    site = digits.sites[0]
    validation = Validation(site.model, site.batches)
    own = Candidate(PeerName("us"), site.weights)
    honest = [Candidate(PeerName(f"s{i}"), s.weights) for i, s in enumerate(digits.sites[1:])]
    flipped = Candidate(PeerName("flipped"), corrupt("sfa", site.weights, seed=0), 0, Digest("d"))
    peers = [flipped, *honest]
    verdicts = (
        make_rule("my_rule", {"slack": 0.2})
        .judge(own, peers, validation, RoundContext(Round(0)))
        .verdicts
    )
    refused = Verdict(PeerName("flipped"), False, Reason.REFUSED_BY_RULE, digest=Digest("d"))
    assert verdicts[0] == refused
    assert [(v.accepted, v.reason, v.weight) for v in verdicts[1:]] == [
        (True, Reason.OK, 1 / 4)
    ] * 3
    strict = make_rule("my_rule", {"slack": -99}).judge(
        own, peers, validation, RoundContext(Round(0))
    )
    assert not any(v.accepted for v in strict.verdicts)


def test_the_documented_rule_with_state_works_as_written(install: Install) -> None:
    install("patient", "patient", blocks("python")[1], {"patient": "patient:patient_rule"})
    rule = make_rule("patient", {"rounds_to_wait": 1})
    first = judged(rule, context=RoundContext(Round(0)))
    assert [v.reason for v in first.verdicts] == [Reason.PROBATION] * 2
    assert first.verdicts[0].checks == {"seen": 1}
    second = judged(rule, context=RoundContext(Round(1), state=first.state))
    assert [v.weight for v in second.verdicts] == [1 / 3] * 2
    assert second.state == {"a": 2, "b": 2}


def candidate(name: str, value: float = 1.0) -> Candidate:
    return Candidate(PeerName(name), {"w": torch.full((2,), value)})


def judged(rule: Any, *more: Candidate, context: RoundContext | None = None) -> Judgement:
    peers = [candidate("b"), candidate("a"), *more]
    result: Judgement = rule.judge(candidate("us"), peers, None, context or RoundContext(Round(0)))
    return result


def rule_returning(answer: Any) -> FunctionRule:
    return FunctionRule("mine", lambda own, peers, validation, context: answer)


def test_the_function_gets_sound_peers_sorted_by_name_and_its_options() -> None:
    seen = []

    def rule(own: Any, peers: Any, validation: Any, context: Any, *, bonus: float = 0.0) -> Any:
        seen.append([peer.peer for peer in peers])
        return {"a": 0.25 + bonus}

    broken = candidate("0", math.nan)
    other_schema = Candidate(PeerName("1"), {"v": torch.zeros(2)})
    verdicts = judged(FunctionRule("mine", rule, {"bonus": 0.5}), broken, other_schema).verdicts
    assert seen == [["a", "b"]]
    assert [(v.peer, v.reason, v.weight) for v in verdicts] == [
        ("b", Reason.REFUSED_BY_RULE, 0.0),
        ("a", Reason.OK, 0.75),
        ("0", Reason.NONFINITE, 0.0),
        ("1", Reason.SCHEMA_MISMATCH, 0.0),
    ]


@pytest.mark.parametrize(
    "answer",
    [{}, {"a": 0}, {"a": 0.0, "b": 1}, {"a": 0.7, "b": 0.1 + 0.2}, {"a": torch.tensor(0.5)}, []],
)
def test_valid_shares_are_used(answer: Any) -> None:
    given = {name: float(share) for name, share in dict(answer).items()}
    for verdict in judged(rule_returning(answer)).verdicts:
        assert verdict.weight == given.get(verdict.peer, 0.0)
        assert verdict.accepted is (verdict.weight > 0)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"a": -0.1}, "-0.1"),
        ({"a": math.nan}, "nan"),
        ({"a": math.inf}, "inf"),
        ({"a": 0.6, "b": 0.6}, "1.2"),
        ({"c": 0.1}, "not among its peers: c"),
        ({"a": "much"}, "'much'"),
        ({"a": None}, "None"),
        (None, "NoneType"),
        (0.5, "float"),
        ([0.5, 0.5], "list"),
        ([Verdict(PeerName("a"), True, Reason.OK)], "weight 0.0"),
        ([Verdict(PeerName("a"), False, Reason.OUTLIER, weight=0.5)], "weight 0.5"),
        ([Verdict(PeerName("a"), True, Reason.OUTLIER, weight=0.5)], "outlier"),
        (Judgement((), {"seen": {1, 2}}), "JSON"),
        (Judgement((), {"seen": math.nan}), "JSON"),
    ],
)
def test_an_invalid_answer_is_an_error_that_names_the_rule(answer: Any, expected: str) -> None:
    with pytest.raises(TaskFailed, match="rule mine") as caught:
        judged(rule_returning(answer))
    assert expected in str(caught.value)


def test_an_exception_of_the_function_is_an_error_that_names_the_rule() -> None:
    def rule(own: Any, peers: Any, validation: Any, context: Any) -> Any:
        return 1 / 0

    with pytest.raises(TaskFailed, match=r"rule mine raised ZeroDivisionError: division by zero"):
        judged(FunctionRule("mine", rule))


def test_a_plugin_cannot_use_a_built_in_name(install: Install) -> None:
    install(
        "shadow",
        "shadow",
        "def rule(own, peers, validation, context): return {}",
        {"krum": "shadow:rule"},
    )
    with pytest.raises(ConfigError, match=r'package shadow .*"krum"'):
        make_rule("krum")
    make_rule("fedavg")
    assert rule_names().count("krum") == 1


def test_two_packages_with_the_same_rule_name_are_refused(install: Install) -> None:
    source = "def rule(own, peers, validation, context): return {}"
    install("first", "first", source, {"mine": "first:rule"})
    install("second", "second", source, {"mine": "second:rule"})
    with pytest.raises(ConfigError, match="first") as caught:
        make_rule("mine")
    assert "second" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import there_is_no_such_module", "package odd cannot be imported"),
        ("def other(): ...", "package odd cannot be imported"),
        ("def rule(:", "package odd cannot be imported"),
        ("rule = 3", "package odd is not a function"),
        ("def rule(own, peers, validation): ...", "own, peers, validation, context"),
        ("def rule(own, peers, validation, *, context): ...", "own, peers, validation, context"),
        ("def rule(own, peers, validation, context, limit): ...", "default"),
        ("def rule(own, peers, validation, context, **rest): ...", "default"),
        ("def rule(own, peers, validation, context, limit=()): ...", "tuple"),
    ],
)
def test_an_unusable_rule_is_an_error_with_a_reason(
    install: Install, source: str, expected: str
) -> None:
    install("odd", "odd", source, {"mine": "odd:rule"})
    with pytest.raises(ConfigError) as caught:
        make_rule("mine")
    assert expected in f"{caught.value} {caught.value.hint}"


def test_options_are_checked_by_type(install: Install) -> None:
    source = """
def rule(own, peers, validation, context, on=True, count=3, scale: float = 1, word="x",
         top: int | None = 2, loose=None):
    return {}
"""
    install("kinds", "kinds", source, {"mine": "kinds:rule"})
    good: list[dict[str, Any]] = [
        {"on": False}, {"count": 4}, {"scale": 2}, {"scale": 0.5}, {"word": ""}, {"top": None},
        {"top": 1}, {"loose": "a"}, {"loose": None}, {"loose": 1.5},
    ]  # fmt: skip
    for options in good:
        make_rule("mine", options)
    bad: list[dict[str, Any]] = [
        {"on": 1}, {"count": 0.5}, {"count": True}, {"scale": "1"}, {"word": 1}, {"top": 0.5},
        {"top": "1"}, {"loose": [1]}, {"scael": 1},
    ]  # fmt: skip
    for options in bad:
        with pytest.raises(ConfigError, match="rule mine"):
            make_rule("mine", options)
    with pytest.raises(ConfigError) as caught:
        make_rule("mien")
    assert caught.value.hint == 'did you mean "mine"?'
