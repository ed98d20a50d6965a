"""`simulate`: one federation, its table and its JSON."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest
from rich.console import Console

from lightyear_node.cli import main
from lightyear_node.errors import ConfigError
from lightyear_node.lab import simulate_command
from lightyear_node.lab.jobs import bad_order
from lightyear_node.lab.simulate_command import (
    SimulateOptions,
    Simulation,
    SiteSummary,
    print_table,
    spec_of,
)
from lightyear_node.lab.simulation_records import SimulatedRound
from lightyear_node.types import PeerName, Round
from tests.support.paths import ROOT

pytest.importorskip("sklearn")

SMALL = ("--clients", "3", "--rounds", "2", "--arg", "epochs=1", "--arg", "batch_size=64")


def test_a_simulation_is_printed_as_json_and_as_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Simulation] = []
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sys, "argv", ["lightyear-node", "simulate", *SMALL, "--format", "json"])
    monkeypatch.setattr("lightyear_node.lab.simulate_command.run", _recording(seen))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    data = json.loads(capsys.readouterr().out)["data"]
    bad = f"client-{bad_order(3, 0)[0]}"
    assert data["malfunctions"] == {bad: {"kind": "sfa", "scale": None}}
    for site in data["sites"]:
        assert site["malfunctioning"] == (site["name"] == bad)
        assert 0 <= site["local"] <= 1
        # Two rounds, two judges.
        assert sum(site["judged"].values()) == 4
        if site["malfunctioning"]:
            assert site["judged"] == {"too_far": 4}
        first, last = site["rounds"]
        assert (first["round"], last["round"]) == (0, 1)
        assert first["local"]["accuracy"] != last["local"]["accuracy"]
        assert (last["local"]["accuracy"], last["merged"]["accuracy"]) == (
            site["local"],
            site["merged"],
        )
        assert first["accepted"] + first["rejected"] == 2
    honest = [site["merged"] for site in data["sites"] if not site["malfunctioning"]]
    assert data["mean"]["honest"]["merged"] == pytest.approx(sum(honest) / 2)
    assert data["update_bytes"] > 100_000
    console = Console(file=io.StringIO(), width=80)
    print_table(seen[0], console)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert " ".join(shown.split()).startswith(
        "accuracy on each site's own test data after 2 rounds of digits under lightyear, seed 0:"
    )
    [line] = [line for line in shown.splitlines() if line.strip().startswith(bad)]
    assert "flipped signs" in line
    assert "0 of 4" in line
    assert "4 too_far" in line
    assert f"{data['mean']['honest']['merged']:.3f}" in shown


def _recording(seen: list[Simulation]) -> Any:
    run = simulate_command.run

    def recording(options: SimulateOptions) -> Simulation:
        seen.append(run(options))
        return seen[-1]

    return recording


def test_sites_without_a_score_are_left_out_of_the_mean() -> None:
    sites = [
        SiteSummary(PeerName("a"), False, 0.5, None, {}),
        SiteSummary(PeerName("b"), False, 0.7, 0.8, {}),
        SiteSummary(PeerName("c"), True, 0.9, 0.2, {}),
    ]
    found = Simulation(spec_of(SimulateOptions(clients=3)), "digits", "accuracy", sites, 1, 1.0)
    assert found.mean("merged", honest=True) == pytest.approx(0.8)
    assert found.mean("merged", honest=False) == pytest.approx(0.5)
    assert found.mean("local", honest=True) == pytest.approx(0.6)
    diverged = Simulation(found.spec, "digits", "accuracy", sites[:1], 1, 1.0)
    assert diverged.mean("merged", honest=True) is None


def test_the_success_of_an_attack_is_printed() -> None:
    def rounds(**metrics: float) -> list[SimulatedRound]:
        return [SimulatedRound(Round(0), {}, metrics, ())]

    sites = [
        SiteSummary(
            PeerName("a"), False, 0.5, 0.5, {}, rounds=rounds(loss=1.0, attack_success=0.5)
        ),
        SiteSummary(
            PeerName("b"), False, 0.5, 0.5, {}, rounds=rounds(loss=1.0, attack_success=1.0)
        ),
        SiteSummary(PeerName("c"), True, 0.5, 0.5, {}, rounds=rounds(loss=1.0)),
    ]
    spec = spec_of(SimulateOptions(clients=3))
    attacked = Simulation(spec, "own.module:build", "loss", sites, 1, 1.0)
    assert attacked.attack_success == 0.75
    assert Simulation(spec, "digits", "accuracy", sites[2:], 1, 1.0).attack_success is None
    console = Console(file=io.StringIO(), width=80)
    print_table(attacked, console)
    assert isinstance(console.file, io.StringIO)
    assert "Attack success at the honest sites: 0.750" in console.file.getvalue()


def test_omitted_options_are_the_tasks_defaults() -> None:
    spec = spec_of(SimulateOptions())
    assert (len(spec.sites), spec.rounds, len(spec.malfunctions)) == (5, 8, 1)
    assert spec.rule.guard
    assert spec.final_only
    assert not spec_of(SimulateOptions(curves=True)).final_only
    assert spec_of(SimulateOptions(malfunction="none", bad=3)).malfunctions == {}
    assert spec_of(SimulateOptions(task="own.module:build")).task.entry == "own.module:build"


def test_settings_become_terms_or_options_of_their_rule() -> None:
    rule = spec_of(SimulateOptions(guard=False, settings={"gamma": 0.5})).rule
    assert (rule.guard, rule.gamma, rule.options) == (False, 0.5, {})
    assert spec_of(SimulateOptions(rule="balance", settings={"gamma": 0.3})).rule.options == {
        "gamma": 0.3
    }


@pytest.mark.parametrize(
    ("options", "words", "hint"),
    [
        (SimulateOptions(task="digit"), "no built-in task `digit`", "did you mean `digits`?"),
        (SimulateOptions(rule="crum"), "no rule `crum`", "did you mean `krum`?"),
        (SimulateOptions(malfunction="sfaa"), "no malfunction `sfaa`", "did you mean `sfa`?"),
        (SimulateOptions(bad=5), "5 of 5 sites cannot malfunction", "--bad"),
        (SimulateOptions(clients=99), "2 to 64 sites", ""),
        (SimulateOptions(settings={"gama": 1}), "no option `gama`", "did you mean `gamma`?"),
        (SimulateOptions(settings={"gamma": 7}), "gamma: Input should be", "--option"),
        (SimulateOptions(partition="iidd"), "partition: kind: Input should be", "docs/suites.md"),
        (SimulateOptions(partition_options={"alpha": 1}), "no kind", "--partition KIND"),
        (SimulateOptions(participation=0.0), "participation is 0.0", "above 0 and at most 1"),
        (SimulateOptions(malfunction_options={"z": 1}), "sfa has no option `z`", "scale only"),
        (SimulateOptions(rule="krum", guard=False), "stand under `options`", "--guard"),
    ],
)
def test_invalid_options_are_refused(options: SimulateOptions, words: str, hint: str) -> None:
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
