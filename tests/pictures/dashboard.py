"""Draws docs/images/dashboard.png: `python -m tests.pictures.dashboard` (needs `prometheus`).

Runs five real sites, one of which flips the signs of its model and one of which is down for a
while, and a real Prometheus; then evaluates the queries of the dashboard for one site.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightyear_node.lab.federation import Federation, Statuses, lay_out, site_names
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.types import PeerName
from tests.pictures import panels as drawing
from tests.support.grafana_board import filled_in, panels
from tests.support.needs import missing_tool
from tests.support.paths import ROOT
from tests.support.prometheus_server import JOB, PrometheusServer, scraping
from tests.support.site_queries import DEADLINE_S, A

AWAY, BROKEN = PeerName("site-d"), PeerName("site-e")
ROUNDS = 150
BEGIN, LEAVES, RETURNS, PICTURE = 1, 40, 60, 135
"""The rounds at which the picture begins, a site stops and returns, and the picture ends."""
STEP_S = 1.0
ABOUT = (
    f"What {A} sees of four other sites, in minutes and seconds."
    f" {BROKEN} sends its model with flipped signs; {AWAY} is switched off for a while."
)
VARIABLES = {"job": JOB, "instance": str(A), "peer": ".*", "__rate_interval": "4s"}


@dataclass(frozen=True)
class Span:
    start: float
    end: float


def at_round(number: int) -> Callable[[Statuses], bool]:
    def reached(statuses: Statuses) -> bool:
        status = statuses[A]
        return status is not None and status["round"] >= number

    return reached


def query_all(prometheus: PrometheusServer, span: Span) -> dict[str, list[drawing.Series]]:
    """Return the results of all queries by panel."""
    return {
        panel["title"]: [
            drawing.Series(
                target["refId"],
                named(target["legendFormat"], one["metric"]),
                one["metric"],
                [(at - span.start, float(value)) for at, value in one["values"]],
            )
            for target in panel["targets"]
            for one in query(prometheus, target, span)
        ]
        for panel in panels()
    }


def query(prometheus: PrometheusServer, target: dict[str, Any], span: Span) -> list[Any]:
    expression = filled_in(target["expr"], VARIABLES)
    start = span.end if target.get("instant") else span.start
    answer = prometheus.query(
        "query_range", query=expression, start=start, end=span.end, step=STEP_S
    )
    return list(answer["result"])


def named(legend: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda label: labels.get(label[1], ""), legend)


def observe(folder: Path) -> dict[str, list[drawing.Series]]:
    homes = lay_out(
        folder / "sites",
        site_names(5),
        seed=7,
        rounds=ROUNDS,
        malfunctions={BROKEN: MalfunctionConfig(kind="sfa")},
    )
    with scraping(homes, folder / "prometheus") as prometheus, Federation(homes) as federation:
        federation.wait_until(at_round(BEGIN), DEADLINE_S)
        start = time.time() - STEP_S
        federation.wait_until(at_round(LEAVES), DEADLINE_S)
        federation.kill(AWAY)
        federation.wait_for_exit(AWAY)
        federation.wait_until(at_round(RETURNS), DEADLINE_S)
        federation.start(AWAY)
        federation.wait_until(at_round(PICTURE), DEADLINE_S)
        return query_all(prometheus, Span(start, time.time()))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "dashboard.png")
    out: Path = parser.parse_args(arguments).out
    if missing := missing_tool("prometheus"):
        sys.exit(missing)
    with tempfile.TemporaryDirectory() as folder:
        found = observe(Path(folder))
    out.write_bytes(drawing.draw(found, ABOUT))


if __name__ == "__main__":
    main()
