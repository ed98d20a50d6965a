"""A real Prometheus watches real sites, one of which malfunctions: an alert, about it alone."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from asking import DEADLINE_S, PATIENT, A, B, C, LayOut
from needs import need

from lightyear_node.config.site import Malfunction
from lightyear_node.lab.federation import Federation, package_environment
from lightyear_node.records import PeerName
from tests.federation.prometheus_server import PrometheusServer, hurried, missing, scraping
from tests.pictures import panels
from tests.pictures.dashboard import Span, answers
from tests.unit.deploy.board import filled_in, panel
from tests.unit.deploy.commands import only_reads

D = PeerName("site-d")
REJECTED = "LightyearPeerRejected"
ROUNDS = 500
"""More than there is time for: in a federation that is done, nobody is alarmed any more."""
FAULTS_ONLY = {"Authentication failures", "Merges that would have done harm", "Transfer errors"}
"""The board's panels that are empty as long as all is well."""
REJECTED_SHOWN = 2
"""What the board's timeline shows as rejected."""
RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks"


@dataclass(frozen=True)
class Watched:
    federation: Federation
    prometheus: PrometheusServer


@pytest.fixture(scope="module")
def watched(lay_out_once: LayOut, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    need(missing())
    homes = lay_out_once(
        4, rounds=ROUNDS, malfunctions={D: Malfunction(kind="sfa")}, barrier=PATIENT
    )
    folder = tmp_path_factory.mktemp("prometheus")
    with scraping(homes, folder) as prometheus, Federation(homes) as federation:
        federation.wait_until(
            lambda _: {(REJECTED, site, D) for site in (A, B, C)} <= prometheus.firing(),
            DEADLINE_S,
        )
        yield Watched(federation, prometheus)


def test_the_malfunctioning_site_is_alerted_on_and_nobody_else(watched: Watched) -> None:
    prometheus = watched.prometheus
    # Its own node judges as all others do, and has nothing to say against them.
    about = [(site, peer) for alert, site, peer in prometheus.firing() if alert == REJECTED]
    assert sorted(about) == [(site, D) for site in (A, B, C)]
    check_series(prometheus)
    check_words(prometheus)
    check_rules(prometheus)
    check_timeline(prometheus)
    check_picture(prometheus)


def check_series(prometheus: PrometheusServer) -> None:
    streaks = prometheus.now("lightyear_peer_consecutive_rejections >= 3")
    who = {(dict(labels)["instance"], dict(labels)["peer"]) for labels in streaks}
    assert who == {(site, D) for site in (A, B, C)}
    accepted = 'lightyear_peer_verdicts_total{instance!="site-d", verdict="accepted"} > 0'
    assert D not in {dict(labels)["peer"] for labels in prometheus.now(accepted)}
    rejected = 'sum by (peer) (lightyear_peer_verdicts_total{peer="site-d", verdict="rejected"})'
    assert prometheus.now(rejected)[(("peer", D),)] >= 9


def check_words(prometheus: PrometheusServer) -> None:
    """They name both sites, and a page that is there."""
    [ours] = [
        one["annotations"]
        for one in prometheus.ask("alerts")["alerts"]
        if one["labels"]["alertname"] == REJECTED and one["labels"]["instance"] == A
    ]
    assert "site-a has rejected the model of site-d" in ours["summary"]
    assert "then tell site-d" in ours["description"]
    assert (RUNBOOKS.parents[1] / ours["runbook_url"]).is_file()


def check_rules(prometheus: PrometheusServer) -> None:
    """None of them fails on what real nodes tell."""
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 15
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []


def check_timeline(prometheus: PrometheusServer) -> None:
    """The board's own query says of the site that it was rejected, and never anything else."""
    [target] = panel("Verdicts")["targets"]
    values = {"job": ".*", "instance": "site-[abc]", "peer": ".*", "__rate_interval": "1m"}
    shown = prometheus.now(filled_in(target["expr"], values))
    about_it = {value for labels, value in shown.items() if dict(labels)["peer"] == D}
    assert about_it == {float(REJECTED_SHOWN)}


def check_picture(prometheus: PrometheusServer) -> None:
    """Every panel that should have something to show has, and can be drawn as in the docs."""
    found = answers(prometheus, Span(time.time() - 2 * DEADLINE_S, time.time()))
    assert {title for title, series in found.items() if not series} <= FAULTS_ONLY
    assert panels.draw(found, "").startswith(b"\x89PNG")


def test_every_command_of_the_runbooks_answers(watched: Watched) -> None:
    """Those that only look, at a site that runs, about its peer site-b and its first round."""
    home = watched.federation.homes[A]
    pages = [page.read_text() for page in sorted(RUNBOOKS.glob("*.md"))]
    told = {tuple("0" if word == "7" else word for word in c) for p in pages for c in only_reads(p)}
    assert len(told) > 10
    for arguments in sorted(told):
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


def test_only_durations_are_hurried() -> None:
    text = "for: 15m\nexpr: rate(x[1h]) > 10m and up offset 2h == 1  # within 15m"
    assert hurried(text) == "for: 15s\nexpr: rate(x[1m]) > 10m and up offset 2m == 1  # within 15m"
