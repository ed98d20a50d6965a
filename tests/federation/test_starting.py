"""A node that builds its task reports that it is starting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightyear_node.config.node import TaskConfig
from lightyear_node.lab.federation import Federation, SiteHome, lay_out, package_environment
from lightyear_node.observe.admin_socket import NotRunning, ask
from lightyear_node.types import PeerName
from tests.support.site_queries import DEADLINE_S, A

pytest.importorskip("sklearn")

SLOW_TASK = """
from lightyear_node.lab.tasks import digits


def build(gate, site_index=0, site_count=1, seed=0):
    with open(gate) as until_it_is_opened:
        until_it_is_opened.read()
    return digits.build(site_index, site_count, seed, epochs=1, batch_size=4096)
"""


def typed(home: SiteHome, *words: str, code: int) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "lightyear_node", *words],
        cwd=home.directory,
        env={**package_environment(), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def is_building(home: SiteHome) -> bool:
    try:
        return "building the task" in ask(home.state_dir, "status")["waiting"]
    except NotRunning:
        return False


def test_a_node_that_builds_its_task_reports_that_it_is_starting(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    task = TaskConfig(entry="slow:build", args={"gate": str(gate)})
    [home, _] = lay_out(tmp_path / "sites", [A, PeerName("site-z")], task=task)
    (home.directory / "slow.py").write_text(SLOW_TASK)
    with Federation([home]) as federation:
        federation.wait_until(lambda _: is_building(home), DEADLINE_S)
        shown = typed(home, "status", code=0)
        assert f"{A} in demo: starting" in shown
        assert "building the task slow:build" in shown
        assert "NOT READY: the node is starting" in shown
        assert "the node is starting" in typed(home, "health", code=3)
        # The other site is down, so `check` exits with 3.
        checked = typed(home, "check", "--no-model", "--timeout", "1", code=3)
        assert f"{home.http_address}, in use by our own node, which is starting" in checked
        for command in (["pause"], ["stop"], ["peers", "block", "site-z"]):
            assert "the node is starting" in typed(home, *command, code=1)
        assert federation.status() == {A: None}
        with gate.open("w"):
            pass
        federation.wait_until(lambda statuses: statuses[A] is not None, DEADLINE_S)
        assert "starting" not in typed(home, "status", code=0)
        assert typed(home, "health", code=0).startswith("ready")
        assert "pausing" in typed(home, "pause", code=0)
