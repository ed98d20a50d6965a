"""`score`: a checkpoint judged by hand gets what the node gave it, to the last bit."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lightyear_node.cli.model
import lightyear_node.cli.score  # noqa: F401
from lightyear_node.config.agreement import ExchangeTerms, RuleTerms
from lightyear_node.errors import ConfigError, LightyearError
from lightyear_node.scoring import Unreadable
from lightyear_node.worker.jobs import verdict_to_plain
from tests.unit import ward
from tests.unit.desk import data_of, ran, refused, told
from tests.unit.graduates import Graduate, graduates

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> list[Graduate]:
    return graduates(tmp_path_factory.mktemp("sites"))


@pytest.fixture
def here(learned: list[Graduate], monkeypatch: pytest.MonkeyPatch) -> Graduate:
    return at_home(learned[0], monkeypatch)


def at_home(site: Graduate, monkeypatch: pytest.MonkeyPatch) -> Graduate:
    monkeypatch.chdir(site.at.directory)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return site


def given(site: Graduate, peer: str) -> dict[str, Any]:
    """What the site decided about a peer in its last round."""
    [verdict] = [one for one in site.decision.verdicts if one.peer == peer]
    return verdict_to_plain(verdict)


def update_of(site: Graduate, peer: str) -> str:
    return str(site.state.updates.path(given(site, peer)["digest"]))


def numbers(data: dict[str, Any]) -> dict[str, float]:
    found = {}
    limits = {"distance": "distance_max", "agreement": "tau", "regret": "regret_max"}
    for check in data["guard"]:
        found[check["name"]] = check["value"]
        if check["limit"] is not None:
            found[limits[check["name"]]] = check["limit"]
    return found


def compare(data: dict[str, Any], recorded: dict[str, Any]) -> None:
    for key in ("peer", "accepted", "reason", "score", "weight", "digest"):
        assert data[key] == recorded[key], key
    assert numbers(data) == recorded["checks"]


def test_a_peers_update_gets_the_verdict_that_was_recorded(here: Graduate) -> None:
    data = data_of("score", update_of(here, "site-b"))
    compare(data, given(here, "site-b"))
    assert (data["round"], data["beside"]) == (2, ["site-c"])
    assert data["about"]
    text = told("score", update_of(here, "site-b"))
    assert "✓ accepted (ok)" in text
    assert "the update of site-b" in text


@pytest.mark.parametrize(
    ("rule", "exchange"),
    [
        (RuleTerms(name="krum", options={"faulty": 1}), ExchangeTerms()),
        (RuleTerms(name="afa"), ExchangeTerms()),
        (RuleTerms(), ExchangeTerms(dtype="bfloat16", exclude=("3.*",))),
    ],
)
def test_whatever_the_rule_and_however_it_travelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: RuleTerms, exchange: ExchangeTerms
) -> None:
    sites = graduates(tmp_path, sites=4, rounds=2, rule=rule, exchange=exchange)
    here = at_home(sites[0], monkeypatch)
    for peer in ("site-b", "site-d"):
        recorded = given(here, peer)
        code = 0 if recorded["accepted"] else 3
        data = data_of("score", update_of(here, peer), code=code)
        for key in ("peer", "accepted", "reason", "score", "digest"):
            assert data[key] == recorded[key], key
    for one in sites:
        one.close()


def test_our_own_export_is_accepted_by_ourselves(here: Graduate, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    told("model", "export", "-o", str(out))
    data = data_of("score", str(out), "--reference", "last")
    assert (data["accepted"], data["score"]) == (True, pytest.approx(1.0))
    assert numbers(data)["distance"] == 0
    assert data["round"] == 3
    again = data_of("score", str(out), "--reference", str(out))
    assert again["score"] == data["score"]
    lines = told("score", str(out), "--reference", "best", "--format", "jsonl")
    assert json.loads(lines.splitlines()[-1])["accepted"]


def saved(path: Path, **changes: Any) -> str:
    state = ward.Network().state_dict()
    save_file({**state, **changes}, path)
    return str(path)


def test_a_bad_checkpoint_gets_the_nodes_own_reasons(here: Graduate, tmp_path: Path) -> None:
    weights = load_file(update_of(here, "site-b"))
    broken = {**weights, "0.weight": weights["0.weight"] * float("nan")}
    save_file(broken, tmp_path / "nan.safetensors")
    turned = {name: -tensor for name, tensor in weights.items() if "running" not in name}
    save_file({**weights, **turned}, tmp_path / "turned.safetensors")
    expected = {
        str(tmp_path / "nan.safetensors"): "nonfinite",
        str(tmp_path / "turned.safetensors"): "too_far",
        saved(tmp_path / "more.safetensors", extra=torch.zeros(3)): "schema_mismatch",
        saved(tmp_path / "other.safetensors", **{"3.bias": torch.zeros(7)}): "schema_mismatch",
        saved(
            tmp_path / "half.safetensors", **{"3.bias": torch.zeros(3).half()}
        ): "schema_mismatch",
        saved(tmp_path / "large.safetensors", extra=torch.zeros(1 << 20)): "too_large",
    }
    for file, reason in expected.items():
        data = data_of("score", file, code=3)
        assert (data["accepted"], data["reason"]) == (False, reason)
        assert data["about"]


def test_what_is_no_checkpoint_cannot_be_read(here: Graduate, tmp_path: Path) -> None:
    state = ward.Network().state_dict()
    torch.save(state, tmp_path / "model.pt")
    (tmp_path / "old.pkl").write_bytes(pickle.dumps({"a": 1}))
    (tmp_path / "text").write_text("no weights here at all")
    (tmp_path / "empty").write_bytes(b"")
    whole = Path(saved(tmp_path / "whole.safetensors")).read_bytes()
    (tmp_path / "short").write_bytes(whole[:-10])
    (tmp_path / "bomb").write_bytes((1 << 62).to_bytes(8, "little") + b"{")
    for name, words in (
        ("model.pt", "pickle"),
        ("old.pkl", "pickle"),
        ("text", "no safetensors"),
        ("empty", "no safetensors"),
        ("short", "no safetensors"),
        ("bomb", "no safetensors"),
        ("missing", "cannot be read"),
        (".", "cannot be read"),
    ):
        problem = refused("score", str(tmp_path / name))
        assert isinstance(problem, Unreadable)
        assert problem.exit_code == 1
        assert words in str(problem), name


def test_a_long_header_is_not_parsed(here: Graduate, tmp_path: Path) -> None:
    state = ward.Network().state_dict()
    save_file(state, tmp_path / "notes.safetensors", metadata={"note": "x" * 200_000})
    data = data_of("score", str(tmp_path / "notes.safetensors"), code=3)
    assert data["reason"] in ("schema_mismatch", "too_large")


def test_without_a_node_that_ran_a_reference_must_be_named(
    here: Graduate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = saved(tmp_path / "m.safetensors")
    monkeypatch.setenv("LIGHTYEAR_STATE_DIR", "nowhere")
    assert isinstance(refused("score", file), ConfigError)
    data = data_of("score", file, "--reference", file)
    assert (data["accepted"], data["round"]) == (True, 1)
    other = saved(tmp_path / "other.safetensors", **{"3.bias": torch.zeros(7)})
    assert "cannot be the reference" in str(refused("score", file, "--reference", other))
    assert "is not there" in str(refused("score", file, "--reference", "worst"))


def test_a_task_that_cannot_be_built_is_named(
    here: Graduate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTYEAR_TASK_ENTRY", "tests.unit.ward:nothing")
    ended = ran("score", saved(tmp_path / "m.safetensors"))
    assert isinstance(ended.exception, LightyearError)
    assert "nothing" in str(ended.exception)
