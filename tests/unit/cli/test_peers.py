"""`peers list` and `peers show`: from a running node, from its journal, from the file alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import lightyear_node.cli.peers  # noqa: F401
from tests.support.cli_runner import data_of, error_of, output_of
from tests.support.journals import a_federation
from tests.unit.cli.test_status import answering, status

NAMES = ["site-a", "site-b", "site-c"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of site-a, which is the working directory."""
    here = a_federation(tmp_path) / "site-a"
    monkeypatch.chdir(here)
    return here


def test_without_a_node_or_journal_the_file_is_shown(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home.parent)
    listed = data_of("peers", "list")
    assert (listed["federation"], listed["source"]) == ("ward", "files")
    assert [peer["name"] for peer in listed["peers"]] == NAMES
    lines = output_of("peers", "list", "--format", "jsonl").splitlines()
    assert [json.loads(line) for line in lines[:3]] == listed["peers"]
    shown = data_of("peers", "show", "site-b")
    assert shown["judged"] is None
    assert shown["certificates"][0]["fingerprint"] == listed["peers"][1]["fingerprint"][0]


def test_without_a_node_verdicts_come_from_the_journal(home: Path) -> None:
    judged = data_of("peers", "show", "site-b")["judged"]
    assert (judged["accepted"], judged["rejected"], judged["missing"]) == (3, 0, 0)
    assert judged["last"]["round"] == 2
    text = output_of("peers", "show", "site-c")
    assert "no node runs here" in text
    assert "0 × accepted, 3 × rejected" in text
    assert "lightyear-node explain --round 2 --peer site-c" in text


def test_with_a_running_node_its_state_is_shown(home: Path) -> None:
    with answering(home, status(blocked=["site-b"])):
        listed = data_of("peers", "list")
        shown = data_of("peers", "show", "site-b")
        table, page = output_of("peers", "list"), output_of("peers", "show", "site-b")
        us = output_of("peers", "show", "site-a")
    assert listed["source"] == "node"
    ours, b, c = listed["peers"]
    assert (ours["us"], b["us"], c["seen"]) == (True, False, None)
    assert b["seen"]["agreement"] == shown["seen"]["agreement"] == 0.412
    assert shown["transfer"]["total"] == 32 << 20
    assert "this site" in table
    assert "✗ rejected" in table
    for words in (
        "`lightyear-node peers unblock site-b` ends it",
        "8.0 MiB of 32.0 MiB, 4.0 MiB/s, about 6 s left",
        "✗ rejected in round 2 (agreement_below_tau)",
        "0.412 (τ 0.60)",
        "1 times in a row",
    ):
        assert words in page
    assert "this site itself" in us


def test_the_file_in_the_nodes_folder_is_found(
    home: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert "site-b" in output_of("peers", "list", "--home", str(home))
    assert "no such file" in str(error_of("peers", "list"))


@pytest.mark.parametrize("command", [["show"], ["remove"]])
def test_a_misspelt_name_is_refused_with_the_nearest_one(home: Path, command: list[str]) -> None:
    before = (home / "peers.yaml").read_text()
    problem = error_of("peers", *command, "sitte-b")
    assert "no peer `sitte-b`" in str(problem)
    assert str(problem.hint) == "did you mean site-b? it has site-a, site-b, site-c"
    assert "did you mean" not in str(error_of("peers", *command, "zzz").hint)
    assert (home / "peers.yaml").read_text() == before
