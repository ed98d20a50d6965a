"""Taking a model out: what is in the file, what the card says, and everything that can go wrong."""

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
from lightyear_node.config.agreement import ExchangeTerms, RuleTerms
from lightyear_node.errors import ConfigError, DiskFull, StoreError
from lightyear_node.export import taking
from lightyear_node.worker.train import evaluate
from tests.unit import ward
from tests.unit.annals import alter
from tests.unit.desk import data_of, refused, told
from tests.unit.graduates import SEED, Graduate, graduates, play

CPU = torch.device("cpu")


def closed(learned: list[Graduate]) -> Graduate:
    for one in learned:
        one.close()
    return learned[0]


@pytest.fixture(scope="module")
def plain_site(tmp_path_factory: pytest.TempPathFactory) -> Graduate:
    """Site-a after three rounds, of which the models of two are kept."""
    return closed(graduates(tmp_path_factory.mktemp("plain")))


@pytest.fixture
def here(plain_site: Graduate, monkeypatch: pytest.MonkeyPatch) -> Graduate:
    monkeypatch.chdir(plain_site.at.directory)
    return plain_site


def measured(file: Path) -> dict[str, float]:
    """What a fresh network with these weights achieves, as the node measures it."""
    task = ward.build(site_index=0, seed=SEED)
    network = ward.Network()
    found = network.load_state_dict(load_file(file), strict=False)
    assert not found.unexpected_keys
    assert not found.missing_keys
    return evaluate(task, network, task.val_data, CPU)


def test_the_exported_model_measures_what_was_recorded(here: Graduate, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    data = data_of("model", "export", "--round", "last", "-o", str(out))
    entry = here.ledger.rounds()[-1]
    assert measured(out) == entry["merged"]
    assert (data["round"], data["digest"], data["which"]) == (2, entry["model"], "shared")
    ours = load_file(here.state.models.path(entry["model"]))
    theirs = load_file(out)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    summed = subprocess.run(["sha256sum", out], capture_output=True, text=True, check=True)
    assert summed.stdout.split()[0] == data["sha256"]
    with safe_open(out, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["lightyear.model_digest"] == entry["model"]
    assert metadata["format"] == "pt"


def test_the_card_says_where_a_model_comes_from(here: Graduate, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    told("model", "export", "-o", str(out))
    card = json.loads(out.with_suffix(".json").read_text())
    words = out.with_suffix(".md").read_text()
    assert (card["federation"], card["site"], card["task"]) == ("demo", "site-a", ward_entry())
    assert card["rule"]["name"] == "lightyear"
    assert card["rule"]["terms"]["tau"] == 0.6
    assert card["rounds"] == {"completed": 3, "agreed": 4}
    assert [one["round"] for one in card["history"]] == [0, 1, 2]
    assert {verdict["peer"] for verdict in card["round"]["verdicts"]} == {"site-b", "site-c"}
    assert all(verdict["about"] for verdict in card["round"]["verdicts"])
    head = here.ledger.head
    assert head is not None
    assert card["record"]["round"] == {
        "seq": head.seq,
        "hash": head.hash,
        "signature": head.signature.hex(),
    }
    for text in (head.hash, card["file"]["sha256"], "TO BE FILLED IN", "may carry information"):
        assert text in words


def ward_entry() -> str:
    return "tests.unit.ward:build"


def test_the_cards_example_works_as_it_stands(here: Graduate, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    told("model", "export", "-o", str(out))
    [code] = re.findall(r"```python\n(.*?)```", out.with_suffix(".md").read_text(), re.DOTALL)
    code += (
        "\nimport json\nfrom lightyear_node.worker.train import evaluate\n"
        "print(json.dumps(evaluate(task, model, task.val_data, torch.device('cpu'))))"
    )
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == here.ledger.rounds()[-1]["merged"]


def test_the_best_model_is_the_one_with_the_lowest_loss(here: Graduate, tmp_path: Path) -> None:
    data = data_of("model", "export", "--round", "best", "-o", str(tmp_path / "m.safetensors"))
    losses = {one["round"]: one["merged"]["loss"] for one in here.ledger.rounds()}
    assert data["round"] == min(losses, key=lambda round: losses[round])


def test_models_are_listed(here: Graduate) -> None:
    listed = data_of("model", "list")
    assert [one["round"] for one in listed] == [1, 2]
    assert "last" in listed[1]["names"]
    assert {name for one in listed for name in one["names"]} == {"best", "last"}
    assert listed[1]["bytes"] == here.state.models.path(listed[1]["digest"]).stat().st_size
    lines = told("model", "list", "--format", "jsonl").splitlines()
    assert [json.loads(line) for line in lines] == listed
    assert "last" in told("model", "list")


def test_a_round_that_is_not_there_names_those_that_are(here: Graduate, tmp_path: Path) -> None:
    out = str(tmp_path / "m.safetensors")
    problem = refused("model", "export", "--round", "0", "-o", out)
    assert "round 0 is no longer kept" in str(problem)
    assert "rounds 1, 2" in (problem.hint or "")
    assert "keep" in (problem.hint or "")
    assert "rounds 0, 1, 2" in (refused("model", "export", "--round", "9", "-o", out).hint or "")
    assert "no round" in str(refused("model", "export", "--round", "worst", "-o", out))
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_unless_told(here: Graduate, tmp_path: Path) -> None:
    out = tmp_path / "m.safetensors"
    out.with_suffix(".md").write_text("notes of mine")
    problem = refused("model", "export", "-o", str(out))
    assert "m.md is there already" in str(problem)
    assert [path.name for path in tmp_path.iterdir()] == ["m.md"]
    told("model", "export", "-o", str(out), "--force")
    assert {path.name for path in tmp_path.iterdir()} == {"m.md", "m.json", "m.safetensors"}
    assert ".safetensors" in str(refused("model", "export", "-o", str(tmp_path / "m.pt")))


def test_a_damaged_model_is_not_written(
    here: Graduate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = here.state.models.path(here.ledger.model)
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    try:
        problem = refused("model", "export", "-o", str(tmp_path / "m.safetensors"))
    finally:
        path.write_bytes(sound)
    assert isinstance(problem, StoreError)
    assert "damaged" in str(problem)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing_behind(
    here: Graduate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device that is always full stands for the file."""
    monkeypatch.setattr(taking, "_scratch", _on_full_device)
    problem = refused("model", "export", "-o", str(tmp_path / "m.safetensors"))
    assert isinstance(problem, DiskFull)
    assert problem.exit_code == 4
    assert not list(tmp_path.iterdir())


class _on_full_device:
    def __init__(self, targets: object) -> None: ...

    def __enter__(self) -> list[Path]:
        return [Path("/dev/full")] * 3

    def __exit__(self, *about: object) -> None: ...


def test_where_no_node_has_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(refused("model", "list"), ConfigError)


def test_dittos_personal_model_is_the_one_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = closed(graduates(tmp_path / "sites", sites=2, rounds=2, rule=RuleTerms(name="ditto")))
    monkeypatch.chdir(site.at.directory)
    personal, shared = tmp_path / "personal.safetensors", tmp_path / "shared.safetensors"
    assert data_of("model", "export", "-o", str(personal))["which"] == "personal"
    recorded = site.ledger.rounds()[-1]["merged"]
    assert measured(personal) == recorded
    told("model", "export", "--which", "shared", "-o", str(shared))
    assert measured(shared) != recorded
    assert not json.loads(shared.with_suffix(".json").read_text())["metrics"]["of_this_model"]
    early = ("model", "export", "--round", "0", "-o", str(tmp_path / "x.safetensors"))
    problem = refused(*early)
    assert "personal model of round 0 is no longer kept" in str(problem)
    assert "round 1" in (problem.hint or "")
    told(*early, "--which", "shared")


def test_a_site_without_a_personal_model_says_so(here: Graduate, tmp_path: Path) -> None:
    out = str(tmp_path / "m.safetensors")
    problem = refused("model", "export", "--which", "personal", "-o", out)
    assert "no personal model" in str(problem)


def test_tensors_that_stay_at_home_are_part_of_the_newest_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = ExchangeTerms(exclude=("3.*",))
    learned = graduates(tmp_path / "sites", sites=2, rounds=2, exchange=exchange)
    site = learned[0]
    monkeypatch.chdir(site.at.directory)
    out = tmp_path / "m.safetensors"
    told("model", "export", "-o", str(out))
    assert measured(out) == site.ledger.rounds()[-1]["merged"]
    older = tmp_path / "older.safetensors"
    told("model", "export", "--round", "0", "-o", str(older))
    card = json.loads(older.with_suffix(".json").read_text())
    assert "3.weight" in card["model"]["absent"]
    assert any("stay at this site" in warning for warning in card["warnings"])
    # While the next round is collecting, the files of the last one are still there.
    for one in learned:
        one.train(2)
    told("model", "export", "--force", "-o", str(out))
    assert measured(out) == site.ledger.rounds()[-1]["merged"]
    closed(learned)


def test_statistics_that_stay_at_home_are_not_those_that_were_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = ExchangeTerms(exclude=("1.*",))
    site = closed(graduates(tmp_path / "sites", sites=2, rounds=2, exchange=exchange))
    monkeypatch.chdir(site.at.directory)
    out = tmp_path / "m.safetensors"
    told("model", "export", "-o", str(out))
    assert measured(out) != site.ledger.rounds()[-1]["merged"]
    card = json.loads(out.with_suffix(".json").read_text())
    assert not card["metrics"]["of_this_model"]
    assert any("BatchNorm" in warning for warning in card["warnings"])


def test_an_export_goes_on_beside_an_open_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's lock is held, and records are being written."""
    learned = graduates(tmp_path / "sites", sites=2, rounds=1)
    monkeypatch.chdir(learned[0].at.directory)
    assert data_of("model", "export", "-o", str(tmp_path / "0.safetensors"))["round"] == 0
    play(learned, 1)
    assert data_of("model", "export", "-o", str(tmp_path / "1.safetensors"))["round"] == 1
    closed(learned)


def test_what_somebody_altered_is_not_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = closed(graduates(tmp_path / "sites", sites=2, rounds=2))
    monkeypatch.chdir(site.at.directory)
    changed = "UPDATE records SET wall_ns = wall_ns + 1 WHERE kind = 'commit' AND round = 1"
    alter(site.at.state_dir / "journal.db", changed)
    out = tmp_path / "m.safetensors"
    assert data_of("model", "export", "-o", str(out))["round"] == 0
    card = json.loads(out.with_suffix(".json").read_text())
    assert any("does not fit" in warning for warning in card["warnings"])


def test_the_file_is_plain_safetensors(here: Graduate, tmp_path: Path) -> None:
    out = tmp_path / "m.safetensors"
    told("model", "export", "-o", str(out))
    content = out.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    assert (8 + length) % 8 == 0
    header = json.loads(content[8 : 8 + length])
    ends = sorted(about["data_offsets"] for name, about in header.items() if name[0] != "_")
    assert ends[0][0] == 0
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ends))
    assert ends[-1][1] == len(content) - 8 - length
