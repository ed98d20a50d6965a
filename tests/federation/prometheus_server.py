"""A real Prometheus server on loopback, which scrapes the sites of a local federation."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightyear_node.lab.federation import LOOPBACK, SiteHome, free_ports, log_tail

RULES = Path(__file__).parents[2] / "deploy" / "prometheus"
JOB = "lightyear"
READY_S = 60.0
ASK_S = 10.0
STOP_S = 20.0


def missing() -> str | None:
    """Why it cannot be run here."""
    found = shutil.which("prometheus")
    return None if found else "prometheus is missing: install Debian's package prometheus"


def hurried(rules: str) -> str:
    """The same rules for a federation whose rounds take seconds.

    A minute of `for`, of a range or of an offset becomes a second, and an hour a minute; nothing
    else is changed.
    """
    shorter = {"m": "s", "h": "m"}
    return re.sub(
        r"(\bfor: |\[|\boffset )(\d+)([mh])\b",
        lambda found: found[1] + found[2] + shorter[found[3]],
        rules,
    )


@dataclass(frozen=True)
class PrometheusServer:
    address: str

    def ask(self, path: str, **parameters: str | float) -> Any:
        """The data of an answer of its HTTP API."""
        query = urllib.parse.urlencode(parameters)
        url = f"http://{self.address}/api/v1/{path}?{query}"
        with urllib.request.urlopen(url, timeout=ASK_S) as answer:
            return json.load(answer)["data"]

    def now(self, expression: str) -> dict[tuple[tuple[str, str], ...], float]:
        """The value of every series, by its labels besides the job."""
        result = self.ask("query", query=expression)["result"]
        return {
            tuple(sorted((k, v) for k, v in one["metric"].items() if k != "job")): float(
                one["value"][1]
            )
            for one in result
        }

    def firing(self) -> set[tuple[str, str, str | None]]:
        """Alert, site and peer of everything that fires."""
        return {
            (labels["alertname"], labels["instance"], labels.get("peer"))
            for one in self.ask("alerts")["alerts"]
            if one["state"] == "firing"
            for labels in [one["labels"]]
        }


@contextlib.contextmanager
def scraping(homes: Sequence[SiteHome], folder: Path) -> Iterator[PrometheusServer]:
    """Every second, with the rules of `deploy/prometheus`, hurried."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("recording.rules.yml", "alerts.rules.yml"):
        (folder / file).write_text(hurried((RULES / file).read_text()))
    targets = [
        {"targets": [home.http_address], "labels": {"instance": home.name}} for home in homes
    ]
    settings = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["*.rules.yml"],
        "scrape_configs": [{"job_name": JOB, "static_configs": targets}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    server = PrometheusServer(f"{LOOPBACK}:{free_ports(1)[0]}")
    log = folder / "prometheus.log"
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={server.address}",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        _wait_until_ready(server, process, log)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(
    server: PrometheusServer, process: subprocess.Popen[bytes], log: Path
) -> None:
    deadline = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < deadline:
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError),
            urllib.request.urlopen(f"http://{server.address}/-/ready", timeout=ASK_S),
        ):
            return
        time.sleep(0.1)
    raise AssertionError(f"Prometheus does not start:\n{log_tail(log)}")
