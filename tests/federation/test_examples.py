"""The examples run as they are in a federation of real nodes, with one worker killed."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import yaml

from lightyear_node.config.federation import ExchangeConfig
from lightyear_node.lab.federation import Federation, SiteHome
from lightyear_node.observe.admin_socket import ask
from tests.support.paths import DOCS, ROOT
from tests.support.site_queries import (
    DEADLINE_S,
    PATIENT,
    LayOut,
    Records,
    change_yaml,
    check_histories,
    run_in_lockstep,
)

EXAMPLES = ROOT / "examples"
ROUNDS = 5
LINES_MAX = 60
POLL_S = 0.01
FOLDERS = sorted(path.parent for path in EXAMPLES.glob("*/node.yaml"))
EXCHANGED = {"vit_lora": ExchangeConfig(include=("*lora_*", "*classifier*"))}


def install(example: Path, home: SiteHome, index: int) -> None:
    """Put the example into the site's folder, and its task into the site's node.yaml."""
    task = yaml.safe_load((example / "node.yaml").read_text())["task"]
    unneeded = shutil.ignore_patterns("__pycache__", "node.yaml")
    if "bundle" in task:  # it gets the site's number from the node
        shutil.copytree(example, home.directory / example.name, ignore=unneeded)
    else:
        shutil.copytree(example, home.directory, ignore=unneeded, dirs_exist_ok=True)
    arguments = task["args"]
    if "script" in task:
        arguments[arguments.index("--site") + 1] = index
    elif "entry" in task:
        arguments["site"] = index
    change_yaml(home.directory / "node.yaml", task=task)


class WorkerKiller:
    """Kills a site's worker once, while it trains in a round after the first."""

    def __init__(self, home: SiteHome) -> None:
        self.home = home
        self.killed = False

    def __call__(self, configured: int) -> None:
        if self.killed or configured == 1:
            return
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            status = ask(self.home.state_dir, "status")
            if status["round"] == configured:
                return  # the round was too short to be seen: the next one is tried
            if status["phase"] == "training" and status["worker_pid"]:
                os.kill(status["worker_pid"], signal.SIGKILL)
                self.killed = True
                return
            time.sleep(POLL_S)


@pytest.mark.parametrize("example", FOLDERS, ids=lambda path: path.name)
def test_an_example_completes_its_rounds_although_a_worker_is_killed(
    lay_out_sites: LayOut, records: Records, example: Path
) -> None:
    homes = lay_out_sites(
        2, rounds=1, barrier=PATIENT, exchange=EXCHANGED.get(example.name, ExchangeConfig())
    )
    for index, home in enumerate(homes):
        install(example, home, index)
    with Federation(homes) as federation:
        killer = WorkerKiller(homes[0])
        run_in_lockstep(federation, ROUNDS, killer)
        assert killer.killed
        check_histories(homes, records)
        for home in homes:
            entries = federation.rounds(home.name)
            verdicts = [verdict for entry in entries for verdict in entry["verdicts"]]
            assert [verdict["accepted"] for verdict in verdicts] == [True] * ROUNDS
            assert entries[-1]["merged"]["loss"] < entries[0]["merged"]["loss"]
    log = homes[0].log.read_text()
    assert "starting another" in log
    if (example / "train.py").exists():
        # The state continued in the new process: each epoch is counted once, or repeated.
        assert f"task: epoch {ROUNDS}," in log
        assert f"epoch {ROUNDS + 1}," not in log


@pytest.mark.parametrize(
    "program", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: str(path.relative_to(EXAMPLES))
)
def test_an_example_is_short(program: Path) -> None:
    assert len(program.read_text().splitlines()) <= LINES_MAX


def test_every_example_is_described() -> None:
    """Each has a line in the documentation; those of rules and attacks have pages of their own."""
    page = (DOCS / "bring-your-own-model.md").read_text()
    for example in EXAMPLES.iterdir():
        if example.name != "__pycache__":
            assert f"../examples/{example.name}" in page, example.name
