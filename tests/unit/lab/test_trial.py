"""`simulate`: one federation, its table and its JSON."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightyear_node.cli import main
from lightyear_node.errors import ConfigError
from lightyear_node.lab import trial
from lightyear_node.lab.jobs import bad_order
from lightyear_node.lab.trial import Options, Seen, Trial, print_table, spec_of
from lightyear_node.records import PeerName

pytest.importorskip("sklearn")

ROOT = Path(__file__).resolve().parents[3]
SMALL = ("--clients", "3", "--rounds", "1", "--arg", "epochs=1", "--arg", "batch_size=64")


def test_one_federation_as_json_and_as_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Trial] = []
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sys, "argv", ["lightyear-node", "simulate", *SMALL, "--format", "json"])
    monkeypatch.setattr("lightyear_node.lab.trial.run", _remembered(seen))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    data = json.loads(capsys.readouterr().out)["data"]
    bad = f"client-{bad_order(3, 0)[0]}"
    assert data["malfunctions"] == {bad: {"kind": "sfa", "scale": None}}
    for site in data["sites"]:
        assert site["malfunctioning"] == (site["name"] == bad)
        assert 0 <= site["local"] <= 1
        # One round, two judges.
        assert sum(site["judged"].values()) == 2
        if site["malfunctioning"]:
            assert site["judged"] == {"too_far": 2}
    honest = [site["merged"] for site in data["sites"] if not site["malfunctioning"]]
    assert data["mean"]["honest"]["merged"] == pytest.approx(sum(honest) / 2)
    assert data["update_bytes"] > 100_000
    console = Console(file=io.StringIO(), width=80)
    print_table(seen[0], console)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    [line] = [line for line in shown.splitlines() if line.strip().startswith(bad)]
    assert "flipped signs" in line
    assert "0 of 2" in line
    assert "2 too_far" in line
    assert f"{data['mean']['honest']['merged']:.3f}" in shown


def _remembered(seen: list[Trial]) -> Any:
    run = trial.run

    def remembering(options: Options) -> Trial:
        seen.append(run(options))
        return seen[-1]

    return remembering


def test_sites_without_a_score_are_left_out_of_the_mean() -> None:
    sites = [
        Seen(PeerName("a"), False, 0.5, None, {}),
        Seen(PeerName("b"), False, 0.7, 0.8, {}),
        Seen(PeerName("c"), True, 0.9, 0.2, {}),
    ]
    found = Trial(spec_of(Options(clients=3)), "digits", "accuracy", sites, 1, 1.0)
    assert found.mean("merged", honest=True) == pytest.approx(0.8)
    assert found.mean("merged", honest=False) == pytest.approx(0.5)
    assert found.mean("local", honest=True) == pytest.approx(0.6)
    diverged = Trial(found.spec, "digits", "accuracy", sites[:1], 1, 1.0)
    assert diverged.mean("merged", honest=True) is None


def test_what_is_left_out_is_the_tasks_own() -> None:
    spec = spec_of(Options())
    assert (len(spec.sites), spec.rounds, len(spec.malfunctions)) == (5, 8, 1)
    assert spec.rule.guard
    assert spec_of(Options(malfunction="none", bad=3)).malfunctions == {}
    assert spec_of(Options(task="own.module:build")).task.entry == "own.module:build"


def test_settings_go_where_their_rule_has_them() -> None:
    terms = spec_of(Options(guard=False, settings={"gamma": 0.5})).rule
    assert (terms.guard, terms.gamma, terms.options) == (False, 0.5, {})
    assert spec_of(Options(rule="balance", settings={"gamma": 0.3})).rule.options == {"gamma": 0.3}


@pytest.mark.parametrize(
    ("options", "words", "hint"),
    [
        (Options(task="digit"), "no built-in task `digit`", "did you mean `digits`?"),
        (Options(rule="crum"), "no rule `crum`", "did you mean `krum`?"),
        (Options(malfunction="sfaa"), "no malfunction `sfaa`", "did you mean `sfa`?"),
        (Options(bad=5), "5 of 5 sites cannot malfunction", "--bad"),
        (Options(clients=99), "2 to 64 sites", ""),
        (Options(settings={"gama": 1}), "no option `gama`", "did you mean `gamma`?"),
        (Options(settings={"gamma": 7}), "gamma: Input should be", "--option"),
        (Options(rule="krum", guard=False), "stand under `options`", "--guard"),
    ],
)
def test_wrong_wishes_are_refused_before_anything_starts(
    options: Options, words: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of(options)
    assert words in str(caught.value)
    assert hint in (caught.value.hint or "")


def test_an_option_needs_a_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightyear-node", "simulate", "--option", "gamma"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 78
    assert "--option gamma: expected key=value" in capsys.readouterr().err
