"""The systemd unit on two machines: started, reloaded, killed, changed and upgraded."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.doc_pages import block
from tests.support.docker_engine import Engine
from tests.support.paths import ROOT
from tests.support.systemd_machines import DOCKERFILE, HOST_IMAGE, NETWORK, SITES, Machine, install
from tests.support.waiting import wait_until

HOME = "/var/lib/lightyear-node"
TASK = '''
"""A hospital's own task: it looks at what the service lets it see."""

import os
from pathlib import Path

from lightyear_node.lab.tasks import digits


def build(data_root, site_index, site_count, seed):
    assert Path(data_root, "images").read_text() == "patients"
    for forbidden in (Path(data_root, "new"), Path("/etc/new"), Path("/var/new")):
        try:
            forbidden.touch()
        except OSError:
            continue
        raise AssertionError(f"{forbidden} can be written")
    print("/srv is", "seen" if os.path.exists("/srv/xray/images") else "hidden")
    return digits.build(site_index, site_count, seed)
'''


@pytest.fixture(scope="module")
def machines(
    engine: Engine, wheelhouse: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Machine]]:
    folder = tmp_path_factory.mktemp("systemd")
    (folder / "Dockerfile").write_text(DOCKERFILE.format(base=engine.base_image))
    engine.docker("build", "-q", "-t", HOST_IMAGE, str(folder))
    engine.docker("network", "create", NETWORK, check=False)
    found = [Machine(engine, name, wheelhouse) for name in SITES]
    try:
        yield install(found)
    finally:
        for machine in found:
            print(machine.run("journalctl", "-u", "lightyear-node", "--no-pager", check=False))
            engine.docker("rm", "-f", machine.name, check=False)
        engine.docker("network", "rm", NETWORK, check=False)


def test_the_unit_becomes_active_when_ready_and_shows_its_status(machines: list[Machine]) -> None:
    for machine in machines:
        assert machine.unit_property("ActiveState") == "active"
        wait_until(lambda m=machine: m.round() >= 2, f"{machine.name} does rounds")
        assert "round" in machine.unit_property("StatusText")
        own = machine.run("cat", f"/proc/{machine.unit_property('MainPID')}/status")
        fields = dict(line.split(":\t", 1) for line in own.splitlines() if ":\t" in line)
        assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
        assert fields["NoNewPrivs"] == "1"
        assert fields["Seccomp"] == "2"
        assert fields["Uid"].split()[0] != "0"


def test_reloading_keeps_the_process(machines: list[Machine]) -> None:
    machine = machines[0]
    pid = machine.unit_property("MainPID")
    machine.run("systemctl", "reload", "lightyear-node")
    reached = machine.round()
    wait_until(lambda: machine.round() > reached, "it goes on")
    assert machine.unit_property("MainPID") == pid


def test_a_killed_node_is_restarted(machines: list[Machine]) -> None:
    machine = machines[0]
    pid, reached = machine.unit_property("MainPID"), machine.round()
    machine.run("kill", "-9", pid)
    wait_until(lambda: machine.unit_property("MainPID") not in ("0", pid), "another process")
    wait_until(lambda: machine.round() > reached, "it goes on where it was")


def test_the_watchdog_restarts_a_node_that_hangs(machines: list[Machine]) -> None:
    machine = machines[1]
    pid = machine.unit_property("MainPID")
    machine.run("kill", "-STOP", pid)
    wait_until(lambda: machine.unit_property("MainPID") not in ("0", pid), "another process")
    assert "watchdog" in machine.run("journalctl", "-u", "lightyear-node", "--no-pager").lower()
    reached = machines[0].round()
    wait_until(lambda: machine.round() > reached, "it goes on")


def test_invalid_settings_are_not_retried(machines: list[Machine]) -> None:
    machine = machines[1]
    settings = f"{HOME}/node.yaml"
    good = machine.run("cat", settings)
    machine.run("systemctl", "stop", "lightyear-node")
    assert machine.unit_property("ExecMainStatus") == "0"
    machine.write(settings, good + "\nno_such_key: 1\n")
    machine.run("systemctl", "start", "lightyear-node", check=False)
    wait_until(lambda: machine.unit_property("ActiveState") == "failed", "it is given up")
    assert machine.unit_property("ExecMainStatus") == "78"
    assert machine.unit_property("NRestarts") == "0"
    machine.write(settings, good)
    machine.run("systemctl", "reset-failed", "lightyear-node")
    machine.run("systemctl", "start", "lightyear-node")
    wait_until(lambda: machine.round() >= 0, "it is back")


def test_a_custom_task_sees_only_the_data_it_is_given(
    machines: list[Machine],
) -> None:
    page, machine = "deploy/systemd/README.md", machines[0]
    machine.run("mkdir", "-p", "/srv/xray", "/srv/task")
    machine.write("/srv/xray/images", "patients")
    machine.write("/srv/task/chest_xray.py", TASK)
    drop_ins = "/etc/systemd/system/lightyear-node.service.d"
    machine.write(f"{drop_ins}/override.conf", block(page, "drop-in"))
    good = machine.run("cat", f"{HOME}/node.yaml")
    machine.write(f"{HOME}/node.yaml", f"{good}\n{block(page, 'task')}")
    machine.run("systemctl", "stop", "lightyear-node")
    machine.type(block(page, "try"), folder="/root")
    machine.run("systemctl", "daemon-reload")
    reached = machines[1].round()
    machine.run("systemctl", "start", "lightyear-node")
    wait_until(lambda: machine.round() > reached, "it trains on what it is shown")
    assert "/srv is hidden" in machine.run("journalctl", "-u", "lightyear-node", "--no-pager")
    machine.run("rm", f"{drop_ins}/override.conf")
    machine.write(f"{HOME}/node.yaml", good)
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", "lightyear-node")


def repository(folder: Path, version: str) -> Path:
    """Return a copy of the repository with another version."""
    copy = folder / version
    for name in ("lightyear_node", "deploy"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    named = copy / "lightyear_node" / "__init__.py"
    text, count = re.subn(r'(__version__ = )"[\d.]+"', rf'\1"{version}"', named.read_text())
    assert count == 1
    named.write_text(text)
    return copy


def test_a_site_is_upgraded_and_rolled_back(machines: list[Machine], tmp_path: Path) -> None:
    """Upgrade one of two sites while the other runs."""
    machine, other = machines
    # The hospital's internal package index.
    machine.write("/etc/pip.conf", "[global]\nno-index = true\nfind-links = /wheelhouse\n")
    for version in ("9.9.9", "0.1.0"):
        machine.copy(repository(tmp_path, version), "/root")
        before = machine.round()
        output = machine.type(block("docs/operators/upgrade.md", "upgrade"), f"/root/{version}")
        assert other.name in output, output
        assert machine.node("--version") == f"lightyear-node {version}"
        assert machine.unit_property("ActiveState") == "active"
        wait_until(lambda before=before: machine.round() > before, "it goes on where it was")
        reached = machine.round()
        wait_until(lambda reached=reached: other.round() > reached, "the other goes on with it")
        wait_until(lambda: "✓ accepted" in machine.node("status"), "models fit")
    status = json.loads(other.node("status", "--format", "json"))["data"]
    assert not status["quarantined"]
