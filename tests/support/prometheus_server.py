"""A Prometheus server on loopback that scrapes the sites of a local federation."""

from __future__ import annotations

import contextlib
import json
import re
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
from tests.support.paths import ROOT

RULES = ROOT / "deploy" / "prometheus"
JOB = "lightyear"
READY_S = 60.0
REQUEST_S = 10.0
STOP_S = 20.0


def shortened(rules: str) -> str:
    """Adapt rules to a federation whose rounds take seconds.

    In every `for`, range and offset, minutes become seconds and hours minutes.
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

    def query(self, path: str, **parameters: str | float) -> Any:
        """Query the HTTP API and return the data of the response."""
        query = urllib.parse.urlencode(parameters)
        url = f"http://{self.address}/api/v1/{path}?{query}"
        with urllib.request.urlopen(url, timeout=REQUEST_S) as answer:
            return json.load(answer)["data"]

    def now(self, expression: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Return the value of every series, by its labels without the job."""
        result = self.query("query", query=expression)["result"]
        return {
            tuple(sorted((k, v) for k, v in one["metric"].items() if k != "job")): float(
                one["value"][1]
            )
            for one in result
        }

    def firing(self) -> set[tuple[str, str, str | None]]:
        """Return alert, site and peer of all firing alerts."""
        return {
            (labels["alertname"], labels["instance"], labels.get("peer"))
            for one in self.query("alerts")["alerts"]
            if one["state"] == "firing"
            for labels in [one["labels"]]
        }


@contextlib.contextmanager
def scraping(homes: Sequence[SiteHome], folder: Path) -> Iterator[PrometheusServer]:
    """Scrape every second, with the shortened rules of `deploy/prometheus`."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("recording.rules.yml", "alerts.rules.yml"):
        (folder / file).write_text(shortened((RULES / file).read_text()))
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
            urllib.request.urlopen(f"http://{server.address}/-/ready", timeout=REQUEST_S),
        ):
            return
        time.sleep(0.1)
    raise AssertionError(f"Prometheus does not start:\n{log_tail(log)}")
