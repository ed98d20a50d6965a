"""A user's own rule: found by its entry point, checked, and the documented one tried as written."""

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
from lightyear_node.learning import Candidate, Probe, corrupt, make_rule
from lightyear_node.learning.rules import FunctionRule, Judgement, Turn, rule_names, rule_options
from lightyear_node.records import Digest, PeerName, Reason, Round, Verdict

PAGE = Path(__file__).parents[3] / "docs" / "own-rule.md"
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """What pip leaves behind: a module and its metadata, in a directory of the path."""

    def put(package: str, module: str, source: str, points: dict[str, str]) -> None:
        folder = tmp_path / package
        metadata = folder / f"{package.replace('-', '_')}-0.1.dist-info"
        metadata.mkdir(parents=True)
        (folder / f"{module}.py").write_text(source)
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n"
        )
        lines = [f"{name} = {value}" for name, value in points.items()]
        (metadata / "entry_points.txt").write_text(
            "\n".join(["[lightyear_node.rules]", *lines, ""])
        )
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, module, raising=False)

    return put


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
    probe = Probe(site.model, site.batches)
    own = Candidate(PeerName("us"), site.weights)
    honest = [Candidate(PeerName(f"s{i}"), s.weights) for i, s in enumerate(digits.sites[1:])]
    flipped = Candidate(PeerName("flipped"), corrupt("sfa", site.weights, seed=0), 0, Digest("d"))
    peers = [flipped, *honest]
    verdicts = (
        make_rule("my_rule", {"slack": 0.2}).judge(own, peers, probe, Turn(Round(0))).verdicts
    )
    refused = Verdict(PeerName("flipped"), False, Reason.REFUSED_BY_RULE, digest=Digest("d"))
    assert verdicts[0] == refused
    assert [(v.accepted, v.reason, v.weight) for v in verdicts[1:]] == [
        (True, Reason.OK, 1 / 4)
    ] * 3
    strict = make_rule("my_rule", {"slack": -99}).judge(own, peers, probe, Turn(Round(0)))
    assert not any(v.accepted for v in strict.verdicts)


def test_the_documented_rule_with_a_memory(install: Install) -> None:
    install("patient", "patient", blocks("python")[1], {"patient": "patient:patient_rule"})
    rule = make_rule("patient", {"rounds_to_wait": 1})
    first = judged(rule, turn=Turn(Round(0)))
    assert [v.reason for v in first.verdicts] == [Reason.PROBATION] * 2
    assert first.verdicts[0].checks == {"seen": 1}
    second = judged(rule, turn=Turn(Round(1), state=first.state))
    assert [v.weight for v in second.verdicts] == [1 / 3] * 2
    assert second.state == {"a": 2, "b": 2}


def candidate(name: str, value: float = 1.0) -> Candidate:
    return Candidate(PeerName(name), {"w": torch.full((2,), value)})


def judged(rule: Any, *more: Candidate, turn: Turn | None = None) -> Judgement:
    peers = [candidate("b"), candidate("a"), *more]
    result: Judgement = rule.judge(candidate("us"), peers, None, turn or Turn(Round(0)))
    return result


def answering(answer: Any) -> FunctionRule:
    return FunctionRule("mine", lambda own, peers, probe, turn: answer)


def test_the_function_sees_sound_peers_by_name_and_its_options() -> None:
    seen = []

    def rule(own: Any, peers: Any, probe: Any, turn: Any, *, bonus: float = 0.0) -> Any:
        seen.append([peer.peer for peer in peers])
        return {"a": 0.25 + bonus}

    broken = candidate("0", math.nan)
    stranger = Candidate(PeerName("1"), {"v": torch.zeros(2)})
    verdicts = judged(FunctionRule("mine", rule, {"bonus": 0.5}), broken, stranger).verdicts
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
def test_shares_that_are_taken(answer: Any) -> None:
    given = {name: float(share) for name, share in dict(answer).items()}
    for verdict in judged(answering(answer)).verdicts:
        assert verdict.weight == given.get(verdict.peer, 0.0)
        assert verdict.accepted is (verdict.weight > 0)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"a": -0.1}, "-0.1"),
        ({"a": math.nan}, "nan"),
        ({"a": math.inf}, "inf"),
        ({"a": 0.6, "b": 0.6}, "1.2"),
        ({"c": 0.1}, "c, which is not among"),
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
def test_answers_that_are_refused_name_the_rule(answer: Any, words: str) -> None:
    with pytest.raises(TaskFailed, match="rule mine") as caught:
        judged(answering(answer))
    assert words in str(caught.value)


def test_what_the_function_raises_names_the_rule() -> None:
    def rule(own: Any, peers: Any, probe: Any, turn: Any) -> Any:
        return 1 / 0

    with pytest.raises(TaskFailed, match=r"rule mine raised ZeroDivisionError: division by zero"):
        judged(FunctionRule("mine", rule))


def test_a_built_in_name_is_not_for_the_taking(install: Install) -> None:
    install(
        "thief", "thief", "def rule(own, peers, probe, turn): return {}", {"krum": "thief:rule"}
    )
    with pytest.raises(ConfigError, match=r'package thief .*"krum"'):
        make_rule("krum")
    make_rule("fedavg")
    assert rule_names().count("krum") == 1


def test_two_packages_with_one_name_are_refused(install: Install) -> None:
    source = "def rule(own, peers, probe, turn): return {}"
    install("first", "first", source, {"mine": "first:rule"})
    install("second", "second", source, {"mine": "second:rule"})
    with pytest.raises(ConfigError, match="first") as caught:
        make_rule("mine")
    assert "second" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import there_is_no_such_module", "package odd cannot be imported"),
        ("def other(): ...", "package odd cannot be imported"),
        ("def rule(:", "package odd cannot be imported"),
        ("rule = 3", "package odd is not a function"),
        ("def rule(own, peers, probe): ...", "own, peers, probe, turn"),
        ("def rule(own, peers, probe, *, turn): ...", "own, peers, probe, turn"),
        ("def rule(own, peers, probe, turn, limit): ...", "default"),
        ("def rule(own, peers, probe, turn, **rest): ...", "default"),
        ("def rule(own, peers, probe, turn, limit=()): ...", "tuple"),
    ],
)
def test_a_rule_that_cannot_be_used_says_why(install: Install, source: str, words: str) -> None:
    install("odd", "odd", source, {"mine": "odd:rule"})
    with pytest.raises(ConfigError) as caught:
        make_rule("mine")
    assert words in f"{caught.value} {caught.value.hint}"


def test_options_are_checked_by_kind(install: Install) -> None:
    source = """
def rule(own, peers, probe, turn, on=True, count=3, scale: float = 1, word="x", top: int | None = 2,
         loose=None):
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
