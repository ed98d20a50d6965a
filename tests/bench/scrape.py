"""Measures the CPU time of scraping a real node ten times per second.

The node has eight peers, all of them down, and waits for them: it does not train, but calls them at
every heartbeat.  Intervals with and without scrapes alternate; the difference is the cost of
scraping.  Prints one JSON object; the goal is a share of one core.

    python tests/bench/scrape.py
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from lightyear_node.config.federation import BarrierConfig
from lightyear_node.lab.federation import Federation, SiteHome, lay_out, site_names

DEADLINE_S = 120.0
PEERS = 8
SCRAPES_PER_S = 10
TURN_S = 10.0
TURNS = 3
GOAL = 0.02


def scrape(home: SiteHome) -> bytes:
    """Scrape as Prometheus does."""
    client = http.client.HTTPConnection(home.http_address, timeout=10)
    client.request("GET", "/metrics", headers={"Accept": "text/plain;version=0.0.4"})
    answer = client.getresponse()
    text = answer.read()
    assert answer.status == 200
    client.close()
    return text


def share_of_a_core(node: psutil.Process, each_time: Callable[[], Any]) -> float:
    """CPU share of the daemon only: the worker is another process."""

    def spent_s() -> float:
        times = node.cpu_times()
        return float(times.user + times.system)

    started, before_s = time.monotonic(), spent_s()
    for number in range(int(TURN_S * SCRAPES_PER_S)):
        each_time()
        time.sleep(max(0.0, started + (number + 1) / SCRAPES_PER_S - time.monotonic()))
    return (spent_s() - before_s) / (time.monotonic() - started)


def measure(home: SiteHome) -> dict[str, Any]:
    with Federation([home]) as federation:
        federation.wait_until(
            lambda statuses: (
                (status := statuses[home.name]) is not None
                and status["phase"] in ("observing", "collecting")
            ),
            DEADLINE_S,
        )
        node = psutil.Process(federation.pid(home.name))
        shares: dict[str, list[float]] = {"unscraped": [], "scraped": []}
        for _ in range(TURNS):
            shares["unscraped"].append(share_of_a_core(node, lambda: None))
            shares["scraped"].append(share_of_a_core(node, lambda: scrape(home)))
        text = scrape(home)
    series = [line for line in text.splitlines() if not line.startswith(b"#")]
    median = {name: statistics.median(found) for name, found in shares.items()}
    cost = median["scraped"] - median["unscraped"]
    return {
        "peers": PEERS,
        "series": len(series),
        "kb": round(len(text) / 1000),
        "scrapes_per_s": SCRAPES_PER_S,
        "core_share": {name: round(share, 4) for name, share in median.items()},
        "ms_per_scrape": round(1000 * cost / SCRAPES_PER_S, 3),
        "scraping_share": round(cost, 4),
        "goal": GOAL,
        "goal_met": cost < GOAL,
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        barrier = BarrierConfig(heartbeat=5.0)
        home = lay_out(Path(folder), site_names(PEERS + 1), rounds=5, barrier=barrier)[0]
        found = measure(home)
    print(json.dumps({"bench": "scrape", "cores": os.cpu_count(), **found}))


if __name__ == "__main__":
    main()
