"""The systemd unit on two machines with a real systemd, installed as its README says.

The machines are containers whose first process is systemd.  One line of the unit cannot be kept
there: a container that may make user namespaces is more than this engine may give.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine import ROOT, Engine

SITES = ("site-a", "site-b")
NETWORK = "lightyear-systemd"
HOST_IMAGE = "lightyear-systemd:test"
DEADLINE_S = 240.0
DOCKERFILE = """
FROM {base}
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends systemd dbus procps >/dev/null \
 && rm -rf /var/lib/apt/lists/*
STOPSIGNAL SIGRTMIN+3
CMD ["/lib/systemd/systemd"]
"""
AS_NODE = ("runuser", "-u", "lightyear", "--", "lightyear-node")


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:.0f} s: {what}"
        time.sleep(1)


class Machine:
    def __init__(self, engine: Engine, name: str, wheelhouse: Path) -> None:
        self.name = name
        self._engine = engine
        engine.docker("rm", "-f", name, check=False)
        engine.docker(
            "run", "-d", "--name", name, "--hostname", name, "--network", NETWORK,
            "--cgroupns=private", "--cap-add", "SYS_ADMIN", "--security-opt", "seccomp=unconfined",
            "--security-opt", "apparmor=unconfined", "--tmpfs", "/run", "--tmpfs", "/tmp",
            "-v", f"{ROOT / 'deploy'}:/deploy:ro", "-v", f"{wheelhouse}:/wheelhouse:ro", HOST_IMAGE,
        )  # fmt: skip

    def do(self, *command: str, check: bool = True) -> str:
        return self._engine.docker("exec", "-w", "/root", self.name, *command, check=check)

    def is_up(self) -> bool:
        running = self._engine.docker("inspect", "-f", "{{.State.Running}}", self.name)
        assert running == "true", self._engine.docker("logs", self.name)
        return self.do("systemctl", "is-system-running", check=False) in ("running", "degraded")

    def node(self, *arguments: str) -> str:
        command = ("exec", "-w", "/var/lib/lightyear-node", self.name, *AS_NODE, *arguments)
        return self._engine.docker(*command)

    def shows(self, what: str) -> str:
        return self.do("systemctl", "show", "-p", what, "--value", "lightyear-node")

    def round(self) -> int:
        answer = self._engine.run(
            "docker", "exec", "-w", "/var/lib/lightyear-node", self.name,
            *AS_NODE, "status", "--format", "json",
        )  # fmt: skip
        return int(json.loads(answer.stdout)["data"]["round"]) if answer.returncode == 0 else -1

    def write(self, path: str, text: str) -> None:
        subprocess.run(
            ["docker", "exec", "-i", self.name, "sh", "-c", f"cat > {path}"],
            input=text, text=True, check=True, env=self._engine.environment,
        )  # fmt: skip


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
            print(machine.do("journalctl", "-u", "lightyear-node", "--no-pager", check=False))
            engine.docker("rm", "-f", machine.name, check=False)
        engine.docker("network", "rm", NETWORK, check=False)


def install(machines: list[Machine]) -> list[Machine]:
    """As a hospital's administrator does it."""
    lines = []
    for machine in machines:
        wait_until(machine.is_up, "systemd runs")
        machine.do(
            "env", "PACKAGE=lightyear-node[demo]", "sh", "/deploy/systemd/install.sh", "/wheelhouse"
        )
        machine.node("init", ".", "--name", machine.name, "--address", f"{machine.name}:7443")
        lines.append(machine.node("id"))
    first, *others = machines
    first.node("peers", "add", "--federation", "two", "--rounds", "5000", *lines)
    agreed = first.do("cat", "/var/lib/lightyear-node/peers.yaml")
    for machine in others:
        machine.write("/var/lib/lightyear-node/peers.yaml", agreed)
    for machine in machines:
        machine.do("mkdir", "-p", "/etc/systemd/system/lightyear-node.service.d")
        drop_in = "[Service]\nPrivateUsers=no\nWatchdogSec=10\n"
        machine.write("/etc/systemd/system/lightyear-node.service.d/test.conf", drop_in)
        machine.do("systemctl", "daemon-reload")
        machine.do("systemctl", "enable", "--now", "lightyear-node")
    return machines


def test_it_starts_when_it_is_ready_and_says_what_it_does(machines: list[Machine]) -> None:
    for machine in machines:
        assert machine.shows("ActiveState") == "active"
        wait_until(lambda m=machine: m.round() >= 2, f"{machine.name} does rounds")
        assert "round" in machine.shows("StatusText")
        own = machine.do("cat", f"/proc/{machine.shows('MainPID')}/status")
        fields = dict(line.split(":\t", 1) for line in own.splitlines() if ":\t" in line)
        assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
        assert fields["NoNewPrivs"] == "1"
        assert fields["Seccomp"] == "2"
        assert fields["Uid"].split()[0] != "0"


def test_reloading_keeps_the_process(machines: list[Machine]) -> None:
    machine = machines[0]
    pid = machine.shows("MainPID")
    machine.do("systemctl", "reload", "lightyear-node")
    reached = machine.round()
    wait_until(lambda: machine.round() > reached, "it goes on")
    assert machine.shows("MainPID") == pid


def test_a_killed_node_is_started_again(machines: list[Machine]) -> None:
    machine = machines[0]
    pid, reached = machine.shows("MainPID"), machine.round()
    machine.do("kill", "-9", pid)
    wait_until(lambda: machine.shows("MainPID") not in ("0", pid), "another process")
    wait_until(lambda: machine.round() > reached, "it goes on where it was")


def test_a_node_that_hangs_is_found_by_the_watchdog(machines: list[Machine]) -> None:
    machine = machines[1]
    pid = machine.shows("MainPID")
    machine.do("kill", "-STOP", pid)
    wait_until(lambda: machine.shows("MainPID") not in ("0", pid), "another process")
    assert "watchdog" in machine.do("journalctl", "-u", "lightyear-node", "--no-pager").lower()
    reached = machines[0].round()
    wait_until(lambda: machine.round() > reached, "it goes on")


def test_bad_settings_are_not_tried_again_and_again(machines: list[Machine]) -> None:
    machine = machines[1]
    settings = "/var/lib/lightyear-node/node.yaml"
    good = machine.do("cat", settings)
    machine.do("systemctl", "stop", "lightyear-node")
    assert machine.shows("ExecMainStatus") == "0"
    machine.write(settings, good + "\nno_such_key: 1\n")
    machine.do("systemctl", "start", "lightyear-node", check=False)
    wait_until(lambda: machine.shows("ActiveState") == "failed", "it is given up")
    assert machine.shows("ExecMainStatus") == "78"
    assert machine.shows("NRestarts") == "0"
    machine.write(settings, good)
    machine.do("systemctl", "reset-failed", "lightyear-node")
    machine.do("systemctl", "start", "lightyear-node")
    wait_until(lambda: machine.round() >= 0, "it is back")
