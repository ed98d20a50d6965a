"""Model export: the file, the card, and the failures."""

from __future__ import annotations

import itertools
import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import lightyear_node.cli.model  # noqa: F401
from lightyear_node.config.federation import ExchangeConfig, RuleConfig
from lightyear_node.errors import ConfigError, DiskFull, StoreError
from lightyear_node.tools.model_export import export_file
from lightyear_node.worker.training import evaluate
from tests.support import tiny_task
from tests.support.cli_runner import data_of, error_of, output_of
from tests.support.finished_sites import SEED, FinishedSite, make_finished_sites, run_round
from tests.support.journals import alter
from tests.support.needs import need_tool
from tests.support.paths import ROOT

CPU = torch.device("cpu")


def closed(learned: list[FinishedSite]) -> FinishedSite:
    for one in learned:
        one.close()
    return learned[0]


@pytest.fixture(scope="module")
def plain_site(tmp_path_factory: pytest.TempPathFactory) -> FinishedSite:
    """Site-a after three rounds; the models of two are kept."""
    return closed(make_finished_sites(tmp_path_factory.mktemp("plain")))


@pytest.fixture
def here(plain_site: FinishedSite, monkeypatch: pytest.MonkeyPatch) -> FinishedSite:
    monkeypatch.chdir(plain_site.at.directory)
    return plain_site


def measured(file: Path) -> dict[str, float]:
    """The metrics of a new network with these weights, measured as the node does."""
    task = tiny_task.build(site_index=0, seed=SEED)
    network = tiny_task.Network()
    found = network.load_state_dict(load_file(file), strict=False)
    assert not found.unexpected_keys
    assert not found.missing_keys
    return evaluate(task, network, task.val_data, CPU)


def test_the_exported_model_has_the_recorded_metrics(here: FinishedSite, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    data = data_of("model", "export", "--round", "last", "-o", str(out))
    entry = here.round_journal.rounds()[-1]
    assert measured(out) == entry["merged"]
    assert (data["round"], data["digest"], data["which"]) == (2, entry["model"], "shared")
    ours = load_file(here.state.models.path(entry["model"]))
    theirs = load_file(out)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    need_tool("sha256sum")
    summed = subprocess.run(["sha256sum", out], capture_output=True, text=True, check=True)
    assert summed.stdout.split()[0] == data["sha256"]
    with safe_open(out, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["lightyear.model_digest"] == entry["model"]
    assert metadata["format"] == "pt"


def test_the_card_shows_the_provenance_of_a_model(here: FinishedSite, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    output_of("model", "export", "-o", str(out))
    card = json.loads(out.with_suffix(".json").read_text())
    markdown = out.with_suffix(".md").read_text()
    assert (card["federation"], card["site"], card["task"]) == ("demo", "site-a", task_entry())
    assert card["rule"]["name"] == "lightyear"
    assert card["rule"]["terms"]["tau"] == 0.6
    assert card["rounds"] == {"completed": 3, "agreed": 4}
    assert [one["round"] for one in card["history"]] == [0, 1, 2]
    assert {verdict["peer"] for verdict in card["round"]["verdicts"]} == {"site-b", "site-c"}
    assert all(verdict["about"] for verdict in card["round"]["verdicts"])
    head = here.round_journal.head
    assert head is not None
    assert card["record"]["round"] == {
        "seq": head.seq,
        "hash": head.hash,
        "signature": head.signature.hex(),
    }
    for text in (head.hash, card["file"]["sha256"], "TO BE FILLED IN", "may carry information"):
        assert text in markdown


def task_entry() -> str:
    return "tests.support.tiny_task:build"


def test_the_loading_code_of_the_card_runs(here: FinishedSite, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    output_of("model", "export", "-o", str(out))
    [code] = re.findall(r"```python\n(.*?)```", out.with_suffix(".md").read_text(), re.DOTALL)
    code += (
        "\nimport json\nfrom lightyear_node.worker.training import evaluate\n"
        "print(json.dumps(evaluate(task, model, task.val_data, torch.device('cpu'))))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == here.round_journal.rounds()[-1]["merged"]


def test_the_best_model_is_the_one_with_the_lowest_loss(here: FinishedSite, tmp_path: Path) -> None:
    data = data_of("model", "export", "--round", "best", "-o", str(tmp_path / "m.safetensors"))
    losses = {one["round"]: one["merged"]["loss"] for one in here.round_journal.rounds()}
    assert data["round"] == min(losses, key=lambda round: losses[round])


def test_models_are_listed(here: FinishedSite) -> None:
    listed = data_of("model", "list")
    assert [one["round"] for one in listed] == [1, 2]
    assert "last" in listed[1]["names"]
    assert {name for one in listed for name in one["names"]} == {"best", "last"}
    assert listed[1]["bytes"] == here.state.models.path(listed[1]["digest"]).stat().st_size
    lines = output_of("model", "list", "--format", "jsonl").splitlines()
    assert [json.loads(line) for line in lines] == listed
    assert "last" in output_of("model", "list")


def test_an_error_for_a_missing_round_lists_the_existing_ones(
    here: FinishedSite, tmp_path: Path
) -> None:
    out = str(tmp_path / "m.safetensors")
    problem = error_of("model", "export", "--round", "0", "-o", out)
    assert "round 0 is no longer kept" in str(problem)
    assert "rounds 1, 2" in (problem.hint or "")
    assert "keep" in (problem.hint or "")
    assert "rounds 0, 1, 2" in (error_of("model", "export", "--round", "9", "-o", out).hint or "")
    assert "no round" in str(error_of("model", "export", "--round", "worst", "-o", out))
    assert not list(tmp_path.iterdir())


def test_files_are_overwritten_only_with_force(here: FinishedSite, tmp_path: Path) -> None:
    out = tmp_path / "m.safetensors"
    out.with_suffix(".md").write_text("my notes")
    problem = error_of("model", "export", "-o", str(out))
    assert "m.md already exists" in str(problem)
    assert [path.name for path in tmp_path.iterdir()] == ["m.md"]
    output_of("model", "export", "-o", str(out), "--force")
    assert {path.name for path in tmp_path.iterdir()} == {"m.md", "m.json", "m.safetensors"}
    assert ".safetensors" in str(error_of("model", "export", "-o", str(tmp_path / "m.pt")))


def test_a_damaged_model_is_not_written(
    here: FinishedSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = here.state.models.path(here.round_journal.model)
    intact = path.read_bytes()
    path.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    try:
        problem = error_of("model", "export", "-o", str(tmp_path / "m.safetensors"))
    finally:
        path.write_bytes(intact)
    assert isinstance(problem, StoreError)
    assert "damaged" in str(problem)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_no_files(
    here: FinishedSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device that is always full stands for the file."""
    monkeypatch.setattr(export_file, "staged", _on_full_device)
    problem = error_of("model", "export", "-o", str(tmp_path / "m.safetensors"))
    assert isinstance(problem, DiskFull)
    assert problem.exit_code == 4
    assert not list(tmp_path.iterdir())


class _on_full_device:
    def __init__(self, *targets: object, suffix: str) -> None: ...

    def __enter__(self) -> list[Path]:
        return [Path("/dev/full")] * 3

    def __exit__(self, *about: object) -> None: ...


def test_a_folder_without_a_state_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(error_of("model", "list"), ConfigError)


def test_the_recorded_metrics_are_those_of_dittos_personal_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = closed(
        make_finished_sites(tmp_path / "sites", sites=2, rounds=2, rule=RuleConfig(name="ditto"))
    )
    monkeypatch.chdir(site.at.directory)
    personal, shared = tmp_path / "personal.safetensors", tmp_path / "shared.safetensors"
    assert data_of("model", "export", "-o", str(personal))["which"] == "personal"
    recorded = site.round_journal.rounds()[-1]["merged"]
    assert measured(personal) == recorded
    output_of("model", "export", "--which", "shared", "-o", str(shared))
    assert measured(shared) != recorded
    assert not json.loads(shared.with_suffix(".json").read_text())["metrics"]["of_this_model"]
    early = ("model", "export", "--round", "0", "-o", str(tmp_path / "x.safetensors"))
    problem = error_of(*early)
    assert "personal model of round 0 is no longer kept" in str(problem)
    assert "round 1" in (problem.hint or "")
    output_of(*early, "--which", "shared")


def test_the_served_model_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = RuleConfig(shadow=True)
    site = closed(make_finished_sites(tmp_path / "sites", sites=2, rounds=2, rule=rule))
    monkeypatch.chdir(site.at.directory)
    worth = site.round_journal.rounds()[-1]["worth"]
    served = {"federated": "shared", "alone": "alone"}[worth["served"]]
    for round in ("best", "last"):
        out = tmp_path / f"{round}.safetensors"
        assert data_of("model", "export", "--round", round, "-o", str(out))["which"] == served
    alone, shared = tmp_path / "alone.safetensors", tmp_path / "shared.safetensors"
    output_of("model", "export", "--which", "alone", "-o", str(alone))
    output_of("model", "export", "--which", "shared", "-o", str(shared))
    assert measured(alone) == worth["alone"]
    assert measured(alone) != measured(shared)
    card = json.loads(alone.with_suffix(".json").read_text())
    assert card["worth"].startswith("federated against alone")
    assert "the site trained alone" in " ".join(card["warnings"])
    assert card["worth"] in alone.with_suffix(".md").read_text()


@pytest.mark.parametrize("served", ["federated", "alone"])
def test_the_newest_comparison_decides_what_is_exported(
    here: FinishedSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: str
) -> None:
    """Without a shadow there is nothing to export but the shared model, whatever a record says."""
    monkeypatch.setattr(export_file, "serves_alone", lambda record: served == "alone")
    out = str(tmp_path / "m.safetensors")
    if served == "federated":
        assert data_of("model", "export", "-o", out)["which"] == "shared"
    else:
        assert "trained alone" in str(error_of("model", "export", "-o", out))


def test_exporting_a_personal_model_that_does_not_exist_is_refused(
    here: FinishedSite, tmp_path: Path
) -> None:
    out = str(tmp_path / "m.safetensors")
    problem = error_of("model", "export", "--which", "personal", "-o", out)
    assert "no personal model" in str(problem)


def test_tensors_that_are_not_exchanged_are_exported_with_the_newest_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = ExchangeConfig(exclude=("3.*",))
    learned = make_finished_sites(tmp_path / "sites", sites=2, rounds=2, exchange=exchange)
    site = learned[0]
    monkeypatch.chdir(site.at.directory)
    out = tmp_path / "m.safetensors"
    output_of("model", "export", "-o", str(out))
    assert measured(out) == site.round_journal.rounds()[-1]["merged"]
    older = tmp_path / "older.safetensors"
    output_of("model", "export", "--round", "0", "-o", str(older))
    card = json.loads(older.with_suffix(".json").read_text())
    assert "3.weight" in card["model"]["absent"]
    assert any("stay at this site" in warning for warning in card["warnings"])
    # While the next round is collecting, the files of the last one still exist.
    for one in learned:
        one.train(2)
    output_of("model", "export", "--force", "-o", str(out))
    assert measured(out) == site.round_journal.rounds()[-1]["merged"]
    closed(learned)


def test_local_batchnorm_statistics_make_the_recorded_metrics_inexact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = ExchangeConfig(exclude=("1.*",))
    site = closed(make_finished_sites(tmp_path / "sites", sites=2, rounds=2, exchange=exchange))
    monkeypatch.chdir(site.at.directory)
    out = tmp_path / "m.safetensors"
    output_of("model", "export", "-o", str(out))
    assert measured(out) != site.round_journal.rounds()[-1]["merged"]
    card = json.loads(out.with_suffix(".json").read_text())
    assert not card["metrics"]["of_this_model"]
    assert any("BatchNorm" in warning for warning in card["warnings"])


def test_a_model_can_be_exported_while_the_node_is_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node holds its lock, and records are being written."""
    learned = make_finished_sites(tmp_path / "sites", sites=2, rounds=1)
    monkeypatch.chdir(learned[0].at.directory)
    assert data_of("model", "export", "-o", str(tmp_path / "0.safetensors"))["round"] == 0
    run_round(learned, 1)
    assert data_of("model", "export", "-o", str(tmp_path / "1.safetensors"))["round"] == 1
    closed(learned)


def test_rounds_after_an_altered_record_are_not_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = closed(make_finished_sites(tmp_path / "sites", sites=2, rounds=2))
    monkeypatch.chdir(site.at.directory)
    changed = "UPDATE records SET wall_ns = wall_ns + 1 WHERE kind = 'commit' AND round = 1"
    alter(site.at.state_dir / "journal.db", changed)
    out = tmp_path / "m.safetensors"
    assert data_of("model", "export", "-o", str(out))["round"] == 0
    card = json.loads(out.with_suffix(".json").read_text())
    assert any("does not fit" in warning for warning in card["warnings"])


def test_the_file_is_plain_safetensors(here: FinishedSite, tmp_path: Path) -> None:
    out = tmp_path / "m.safetensors"
    output_of("model", "export", "-o", str(out))
    content = out.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    assert (8 + length) % 8 == 0
    header = json.loads(content[8 : 8 + length])
    ends = sorted(about["data_offsets"] for name, about in header.items() if name[0] != "_")
    assert ends[0][0] == 0
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ends))
    assert ends[-1][1] == len(content) - 8 - length
