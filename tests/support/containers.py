"""The federation of docker/compose.yaml, and queries of its containers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from lightyear_node.lab.federation import free_ports
from tests.support.docker_engine import Engine

HONEST = ("site-a", "site-b", "site-c", "site-d")
BROKEN = "site-e"
HYPHENATED = ("docker-compose",)
PLUGIN = ("docker", "compose")
READ_METRICS = """
import sys, urllib.request
token = open("/federation/metrics.token").read().strip()
request = urllib.request.Request("http://127.0.0.1:9464/metrics")
request.add_header("Authorization", "Bearer " + token)
sys.stdout.write(urllib.request.urlopen(request, timeout=10).read().decode())
"""


class ComposeFederation:
    """The containers of one `docker compose up`."""

    def __init__(
        self, engine: Engine, image: str, program: Sequence[str], project: str, rounds: int
    ) -> None:
        self.engine = engine
        self.project = project
        self._program = program
        self.ports = {"HTTP_PORT": str(free_ports(1)[0]), "PROMETHEUS_PORT": str(free_ports(1)[0])}
        self._environment = {
            "COMPOSE_PROJECT_NAME": project,
            "LIGHTYEAR_IMAGE": image,
            "BASE_IMAGE": engine.base_image,
            "ROUNDS": str(rounds),
            **self.ports,
        }

    def compose(self, *arguments: str, profiles: Sequence[str] = (), **more: str) -> str:
        chosen = [word for profile in profiles for word in ("--profile", profile)]
        command = [*self._program, "-f", "docker/compose.yaml", *chosen, *arguments]
        done = self.engine.run(*command, **self._environment, **more)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def container(self, site: str) -> str:
        label = f"label=com.docker.compose.project={self.project}"
        service = f"label=com.docker.compose.service={site}"
        return self.engine.docker("ps", "-aq", "--filter", label, "--filter", service)

    def execute(self, site: str, *command: str, check: bool = True) -> str:
        return self.engine.docker("exec", self.container(site), *command, check=check)

    def state(self, site: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.engine.docker("inspect", self.container(site)))[0]
        return found

    def is_healthy(self, site: str) -> bool:
        return bool(self.state(site)["State"].get("Health", {}).get("Status") == "healthy")

    def status(self, site: str) -> dict[str, Any]:
        answer = self.execute(site, "lightyear-node", "status", "--format", "json")
        found: dict[str, Any] = json.loads(answer)["data"]
        return found

    def round(self, site: str) -> int:
        return int(self.status(site)["round"])

    def metrics(self, site: str) -> dict[str, float]:
        lines = self.execute(site, "python3", "-c", READ_METRICS).splitlines()
        matches = (re.fullmatch(r"([^#]\S*(?:\{.*\})?) (\S+)", line) for line in lines)
        return {match[1]: float(match[2]) for match in matches if match}

    def verdicts(self, site: str, peer: str, verdict: str) -> float:
        """Return how often a site has reached a verdict on a peer, over all reasons."""
        named = f'lightyear_peer_verdicts_total{{peer="{peer}",'
        counts = self.metrics(site).items()
        return sum(
            value
            for name, value in counts
            if name.startswith(named) and f'verdict="{verdict}"' in name
        )

    def logs(self, site: str) -> str:
        """Return a container's standard error, where nodes write their log."""
        return self.engine.run("docker", "logs", self.container(site)).stderr

    def check_stopped_cleanly(self, sites: Sequence[str], *profiles: str) -> None:
        self.compose("stop", "--timeout", "30", profiles=profiles)
        for site in sites:
            assert self.state(site)["State"]["ExitCode"] == 0, site
            assert "Traceback" not in self.logs(site), site
