"""A real Prometheus monitors real sites: it alerts only on the malfunctioning one."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from lightyear_node.lab.federation import Federation, package_environment
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.types import PeerName
from tests.pictures import panels
from tests.pictures.dashboard import Span, query_all
from tests.support.grafana_board import filled_in, panel
from tests.support.needs import need_tool
from tests.support.page_commands import only_reads
from tests.support.paths import DOCS
from tests.support.prometheus_server import PrometheusServer, scraping, shortened
from tests.support.site_queries import DEADLINE_S, PATIENT, A, B, C, LayOut

D = PeerName("site-d")
REJECTED = "LightyearPeerRejected"
ROUNDS = 500
"""More than there is time for: a finished federation raises no alerts."""
FAULTS_ONLY = {"Authentication failures", "Merges that would have done harm", "Transfer errors"}
"""The dashboard's panels that are empty without problems."""
REJECTED_SHOWN = 2
"""The value that the dashboard's timeline shows as rejected."""
RUNBOOKS = DOCS / "runbooks"


@dataclass(frozen=True)
class Watched:
    federation: Federation
    prometheus: PrometheusServer


@pytest.fixture(scope="module")
def watched(lay_out_once: LayOut, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    need_tool("prometheus")
    homes = lay_out_once(
        4, rounds=ROUNDS, malfunctions={D: MalfunctionConfig(kind="sfa")}, barrier=PATIENT
    )
    folder = tmp_path_factory.mktemp("prometheus")
    with scraping(homes, folder) as prometheus, Federation(homes) as federation:
        federation.wait_until(
            lambda _: {(REJECTED, site, D) for site in (A, B, C)} <= prometheus.firing(),
            DEADLINE_S,
        )
        yield Watched(federation, prometheus)


def test_prometheus_alerts_only_on_the_malfunctioning_site(watched: Watched) -> None:
    prometheus = watched.prometheus
    # Its own node works correctly and rejects no other site.
    about = [(site, peer) for alert, site, peer in prometheus.firing() if alert == REJECTED]
    assert sorted(about) == [(site, D) for site in (A, B, C)]
    check_series(prometheus)
    check_texts(prometheus)
    check_rules(prometheus)
    check_timeline(prometheus)
    check_panels(prometheus)


def check_series(prometheus: PrometheusServer) -> None:
    streaks = prometheus.now("lightyear_peer_consecutive_rejections >= 3")
    who = {(dict(labels)["instance"], dict(labels)["peer"]) for labels in streaks}
    assert who == {(site, D) for site in (A, B, C)}
    accepted = 'lightyear_peer_verdicts_total{instance!="site-d", verdict="accepted"} > 0'
    assert D not in {dict(labels)["peer"] for labels in prometheus.now(accepted)}
    rejected = 'sum by (peer) (lightyear_peer_verdicts_total{peer="site-d", verdict="rejected"})'
    assert prometheus.now(rejected)[(("peer", D),)] >= 9


def check_texts(prometheus: PrometheusServer) -> None:
    """Check that the texts name both sites and an existing page."""
    [ours] = [
        one["annotations"]
        for one in prometheus.query("alerts")["alerts"]
        if one["labels"]["alertname"] == REJECTED and one["labels"]["instance"] == A
    ]
    assert "site-a has rejected the model of site-d" in ours["summary"]
    assert "then tell site-d" in ours["description"]
    assert (RUNBOOKS.parents[1] / ours["runbook_url"]).is_file()


def check_rules(prometheus: PrometheusServer) -> None:
    """Check that no rule fails on the metrics of real nodes."""
    rules = [rule for group in prometheus.query("rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 15
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []


def check_timeline(prometheus: PrometheusServer) -> None:
    """Check that the dashboard's query shows the site only as rejected."""
    [target] = panel("Verdicts")["targets"]
    values = {"job": ".*", "instance": "site-[abc]", "peer": ".*", "__rate_interval": "1m"}
    shown = prometheus.now(filled_in(target["expr"], values))
    about_it = {value for labels, value in shown.items() if dict(labels)["peer"] == D}
    assert about_it == {float(REJECTED_SHOWN)}


def check_panels(prometheus: PrometheusServer) -> None:
    """Check that every panel has data and can be drawn as in the docs."""
    found = query_all(prometheus, Span(time.time() - 2 * DEADLINE_S, time.time()))
    assert {title for title, series in found.items() if not series} <= FAULTS_ONLY
    assert panels.draw(found, "").startswith(b"\x89PNG")


def test_every_command_of_the_runbooks_works(watched: Watched) -> None:
    """Run the read-only commands at a running site, for its peer site-b and its first round."""
    home = watched.federation.homes[A]
    pages = [page.read_text() for page in sorted(RUNBOOKS.glob("*.md"))]
    commands = {
        tuple("0" if word == "7" else word for word in c) for p in pages for c in only_reads(p)
    }
    assert len(commands) > 10
    for arguments in sorted(commands):
        ended = subprocess.run(
            [sys.executable, "-m", "lightyear_node", *arguments],
            cwd=home.directory,
            env=package_environment(),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert ended.returncode == 0, (arguments, ended.stdout, ended.stderr)


def test_only_durations_are_shortened() -> None:
    text = "for: 15m\nexpr: rate(x[1h]) > 10m and up offset 2h == 1  # within 15m"
    assert (
        shortened(text) == "for: 15s\nexpr: rate(x[1m]) > 10m and up offset 2m == 1  # within 15m"
    )
