"""`score` gives a checkpoint exactly the verdict that the node gave it."""

from __future__ import annotations

import json
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lightyear_node.cli.model
import lightyear_node.cli.score  # noqa: F401
from lightyear_node.config.federation import ExchangeConfig, RuleConfig
from lightyear_node.errors import ConfigError, LightyearError
from lightyear_node.tools.score_checkpoint import UnreadableCheckpoint
from lightyear_node.worker.job_types import verdict_to_plain
from tests.support import tiny_task
from tests.support.cli_runner import data_of, error_of, output_of, run_cli
from tests.support.finished_sites import FinishedSite, make_finished_sites
from tests.support.paths import ROOT

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> list[FinishedSite]:
    return make_finished_sites(tmp_path_factory.mktemp("sites"))


@pytest.fixture
def here(learned: list[FinishedSite], monkeypatch: pytest.MonkeyPatch) -> FinishedSite:
    return in_folder_of(learned[0], monkeypatch)


def in_folder_of(site: FinishedSite, monkeypatch: pytest.MonkeyPatch) -> FinishedSite:
    monkeypatch.chdir(site.at.directory)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return site


def recorded_verdict(site: FinishedSite, peer: str) -> dict[str, Any]:
    """The site's verdict on a peer in its last round."""
    [verdict] = [one for one in site.decision.verdicts if one.peer == peer]
    return verdict_to_plain(verdict)


def update_of(site: FinishedSite, peer: str) -> str:
    return str(site.state.updates.path(recorded_verdict(site, peer)["digest"]))


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


def test_a_peers_update_gets_the_recorded_verdict(here: FinishedSite) -> None:
    data = data_of("score", update_of(here, "site-b"))
    compare(data, recorded_verdict(here, "site-b"))
    assert (data["round"], data["beside"]) == (2, ["site-c"])
    assert data["about"]
    text = output_of("score", update_of(here, "site-b"))
    assert "✓ accepted (ok)" in text
    assert "the update of site-b" in text


@pytest.mark.parametrize(
    ("rule", "exchange"),
    [
        (RuleConfig(name="krum", options={"faulty": 1}), ExchangeConfig()),
        (RuleConfig(name="afa"), ExchangeConfig()),
        (RuleConfig(), ExchangeConfig(dtype="bfloat16", exclude=("3.*",))),
    ],
)
def test_verdicts_are_equal_for_all_rules_and_wire_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: RuleConfig, exchange: ExchangeConfig
) -> None:
    sites = make_finished_sites(tmp_path, sites=4, rounds=2, rule=rule, exchange=exchange)
    here = in_folder_of(sites[0], monkeypatch)
    for peer in ("site-b", "site-d"):
        recorded = recorded_verdict(here, peer)
        code = 0 if recorded["accepted"] else 3
        data = data_of("score", update_of(here, peer), code=code)
        for key in ("peer", "accepted", "reason", "score", "digest"):
            assert data[key] == recorded[key], key
    for one in sites:
        one.close()


def test_our_own_export_is_accepted(here: FinishedSite, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    output_of("model", "export", "-o", str(out))
    data = data_of("score", str(out), "--reference", "last")
    assert (data["accepted"], data["score"]) == (True, pytest.approx(1.0))
    assert numbers(data)["distance"] == 0
    assert data["round"] == 3
    again = data_of("score", str(out), "--reference", str(out))
    assert again["score"] == data["score"]
    lines = output_of("score", str(out), "--reference", "best", "--format", "jsonl")
    assert json.loads(lines.splitlines()[-1])["accepted"]


def saved(path: Path, **changes: Any) -> str:
    state = tiny_task.Network().state_dict()
    save_file({**state, **changes}, path)
    return str(path)


def with_nan(weights: Tensors) -> Tensors:
    return {**weights, "0.weight": weights["0.weight"] * float("nan")}


def negated(weights: Tensors) -> Tensors:
    return {n: tensor if "running" in n else -tensor for n, tensor in weights.items()}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (with_nan, "nonfinite"),
        (negated, "too_far"),
        (lambda weights: {**weights, "extra": torch.zeros(3)}, "schema_mismatch"),
        (lambda weights: {**weights, "3.bias": torch.zeros(7)}, "schema_mismatch"),
        (lambda weights: {**weights, "3.bias": torch.zeros(3).half()}, "schema_mismatch"),
        (lambda weights: {**weights, "extra": torch.zeros(1 << 20)}, "too_large"),
    ],
    ids=["nan", "negated", "more", "other shape", "half", "large"],
)
def test_a_bad_checkpoint_is_rejected_with_the_nodes_reasons(
    here: FinishedSite, tmp_path: Path, changed: Callable[[Tensors], Tensors], reason: str
) -> None:
    file = tmp_path / "bad.safetensors"
    save_file(changed(load_file(update_of(here, "site-b"))), file)
    data = data_of("score", str(file), code=3)
    assert (data["accepted"], data["reason"]) == (False, reason)
    assert data["about"]


def test_files_that_are_no_checkpoints_are_refused(here: FinishedSite, tmp_path: Path) -> None:
    state = tiny_task.Network().state_dict()
    torch.save(state, tmp_path / "model.pt")
    (tmp_path / "old.pkl").write_bytes(pickle.dumps({"a": 1}))
    (tmp_path / "text").write_text("no weights here at all")
    (tmp_path / "empty").write_bytes(b"")
    whole = Path(saved(tmp_path / "whole.safetensors")).read_bytes()
    (tmp_path / "short").write_bytes(whole[:-10])
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    (tmp_path / "bomb").write_bytes((1 << 62).to_bytes(8, "little") + b"{")
    for name, message in (
        ("model.pt", "pickle"),
        ("old.pkl", "pickle"),
        ("text", "no safetensors"),
        ("empty", "no safetensors"),
        ("short", "no safetensors"),
        ("bomb", "no safetensors"),
        ("missing", "cannot be read"),
        (".", "not a regular file"),
        ("pipe", "not a regular file"),
        ("socket", "cannot be read"),
        ("/dev/zero", "not a regular file"),
    ):
        problem = error_of("score", str(tmp_path / name))
        assert isinstance(problem, UnreadableCheckpoint)
        assert problem.exit_code == 1
        assert message in str(problem), name


def test_a_long_header_is_not_parsed(here: FinishedSite, tmp_path: Path) -> None:
    state = tiny_task.Network().state_dict()
    save_file(state, tmp_path / "notes.safetensors", metadata={"note": "x" * 200_000})
    data = data_of("score", str(tmp_path / "notes.safetensors"), code=3)
    assert data["reason"] in ("schema_mismatch", "too_large")


def test_without_a_state_directory_a_reference_is_required(
    here: FinishedSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = saved(tmp_path / "m.safetensors")
    monkeypatch.setenv("LIGHTYEAR_STATE_DIR", "does-not-exist")
    assert isinstance(error_of("score", file), ConfigError)
    data = data_of("score", file, "--reference", file)
    assert (data["accepted"], data["round"]) == (True, 1)
    other = saved(tmp_path / "other.safetensors", **{"3.bias": torch.zeros(7)})
    assert "cannot be the reference" in str(error_of("score", file, "--reference", other))
    assert "does not exist" in str(error_of("score", file, "--reference", "worst"))


def test_a_task_that_cannot_be_built_is_reported(
    here: FinishedSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTYEAR_TASK_ENTRY", "tests.support.tiny_task:nothing")
    ended = run_cli("score", saved(tmp_path / "m.safetensors"))
    assert isinstance(ended.exception, LightyearError)
    assert "nothing" in str(ended.exception)
