"""Draws docs/images/dashboard.png: `python -m tests.pictures.dashboard` (needs `prometheus`).

Five real sites, one of which flips the signs of its model and one of which is down for a while; a
real Prometheus that scrapes them; and the board's own queries, asked for one site as a hospital
would see it.
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

from lightyear_node.config.site import Malfunction
from lightyear_node.lab.federation import Federation, Statuses, lay_out, site_names
from lightyear_node.records import PeerName
from tests.federation.asking import DEADLINE_S, A
from tests.federation.prometheus_server import JOB, PrometheusServer, missing, scraping
from tests.pictures import panels as ink
from tests.unit.deploy.board import filled_in, panels

ROOT = Path(__file__).parents[2]
AWAY, BROKEN = PeerName("site-d"), PeerName("site-e")
ROUNDS = 150
BEGIN, LEAVES, RETURNS, PICTURE = 1, 40, 60, 135
"""The rounds in which the picture begins, a site goes and comes back, and the picture is taken."""
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


def answers(prometheus: PrometheusServer, span: Span) -> dict[str, list[ink.Series]]:
    """What every query of the board is answered with, by panel."""
    return {
        panel["title"]: [
            ink.Series(
                target["refId"],
                named(target["legendFormat"], one["metric"]),
                one["metric"],
                [(at - span.start, float(value)) for at, value in one["values"]],
            )
            for target in panel["targets"]
            for one in ask(prometheus, target, span)
        ]
        for panel in panels()
    }


def ask(prometheus: PrometheusServer, target: dict[str, Any], span: Span) -> list[Any]:
    query = filled_in(target["expr"], VARIABLES)
    start = span.end if target.get("instant") else span.start
    answer = prometheus.ask("query_range", query=query, start=start, end=span.end, step=STEP_S)
    return list(answer["result"])


def named(legend: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda label: labels.get(label[1], ""), legend)


def observe(folder: Path) -> dict[str, list[ink.Series]]:
    homes = lay_out(
        folder / "sites",
        site_names(5),
        seed=7,
        rounds=ROUNDS,
        malfunctions={BROKEN: Malfunction(kind="sfa")},
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
        return answers(prometheus, Span(start, time.time()))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "dashboard.png")
    out: Path = parser.parse_args(arguments).out
    if lacking := missing():
        sys.exit(lacking)
    with tempfile.TemporaryDirectory() as folder:
        found = observe(Path(folder))
    out.write_bytes(ink.draw(found, ABOUT))


if __name__ == "__main__":
    main()
