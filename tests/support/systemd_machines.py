"""Containers that run systemd as PID 1, with the unit installed as its README says.

A drop-in disables PrivateUsers: these containers may not create user namespaces.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.support.docker_engine import Engine
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

SITES = ("site-a", "site-b")
NETWORK = "lightyear-systemd"
HOST_IMAGE = "lightyear-systemd:test"
DOCKERFILE = """
FROM {base}
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends systemd dbus procps sudo >/dev/null \
 && rm -rf /var/lib/apt/lists/*
STOPSIGNAL SIGRTMIN+3
CMD ["/lib/systemd/systemd"]
"""
AS_NODE = ("runuser", "-u", "lightyear", "--", "lightyear-node")


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

    def run(self, *command: str, check: bool = True) -> str:
        return self._engine.docker("exec", "-w", "/root", self.name, *command, check=check)

    def is_up(self) -> bool:
        running = self._engine.docker("inspect", "-f", "{{.State.Running}}", self.name)
        assert running == "true", self._engine.docker("logs", self.name)
        return self.run("systemctl", "is-system-running", check=False) in ("running", "degraded")

    def node(self, *arguments: str) -> str:
        command = ("exec", "-w", "/var/lib/lightyear-node", self.name, *AS_NODE, *arguments)
        return self._engine.docker(*command)

    def unit_property(self, name: str) -> str:
        return self.run("systemctl", "show", "-p", name, "--value", "lightyear-node")

    def round(self) -> int:
        answer = self._engine.run(
            "docker", "exec", "-w", "/var/lib/lightyear-node", self.name,
            *AS_NODE, "status", "--format", "json",
        )  # fmt: skip
        return int(json.loads(answer.stdout)["data"]["round"]) if answer.returncode == 0 else -1

    def type(self, script: str, folder: str) -> str:
        """Run a script in a shell, as an administrator would."""
        return self._engine.docker("exec", "-w", folder, self.name, "bash", "-ec", script)

    def copy(self, source: Path, target: str) -> None:
        self._engine.docker("cp", str(source), f"{self.name}:{target}")

    def write(self, path: str, text: str) -> None:
        subprocess.run(
            ["docker", "exec", "-i", self.name, "sh", "-c", f"cat > {path}"],
            input=text, text=True, check=True, env=self._engine.environment,
        )  # fmt: skip


def install(machines: list[Machine]) -> list[Machine]:
    """Install and start the node on each machine, as a hospital's administrator would."""
    lines = []
    for machine in machines:
        wait_until(machine.is_up, "systemd runs")
        machine.run(
            "env", "PACKAGE=lightyear-node[demo]", "sh", "/deploy/systemd/install.sh", "/wheelhouse"
        )
        machine.node("init", ".", "--name", machine.name, "--address", f"{machine.name}:7443")
        lines.append(machine.node("id"))
    first, *others = machines
    first.node("peers", "add", "--federation", "two", "--rounds", "5000", *lines)
    agreed = first.run("cat", "/var/lib/lightyear-node/peers.yaml")
    for machine in others:
        machine.write("/var/lib/lightyear-node/peers.yaml", agreed)
    for machine in machines:
        machine.run("mkdir", "-p", "/etc/systemd/system/lightyear-node.service.d")
        drop_in = "[Service]\nPrivateUsers=no\nWatchdogSec=10\n"
        machine.write("/etc/systemd/system/lightyear-node.service.d/test.conf", drop_in)
        machine.run("systemctl", "daemon-reload")
        machine.run("systemctl", "enable", "--now", "lightyear-node")
    return machines
