"""docker/compose.yaml on a real engine: a broken site, kills, and network failures."""

from __future__ import annotations

import json
import re
import shutil
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.containers import BROKEN, HONEST, HYPHENATED, ComposeFederation
from tests.support.docker_engine import Engine
from tests.support.needs import need_tool
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

ALL = (*HONEST, BROKEN)


@pytest.fixture(scope="module")
def federation(engine: Engine, image: str) -> Iterator[ComposeFederation]:
    sites = ComposeFederation(engine, image, HYPHENATED, "lightyear-test", rounds=5000)
    sites.compose("up", "-d", profiles=("attack",))
    try:
        for site in ALL:
            wait_until(lambda site=site: sites.is_healthy(site), f"{site} is healthy")
        yield sites
    finally:
        for site in ALL:
            print(f"--- {site}", sites.logs(site)[-4000:])
        sites.compose("down", "-v", "--timeout", "30", profiles=("attack", "monitoring"))


def test_every_honest_site_rejects_only_the_broken_one(
    federation: ComposeFederation,
) -> None:
    for site in HONEST:
        wait_until(
            lambda site=site: federation.verdicts(site, BROKEN, "rejected") >= 6,
            f"{site} rejects {BROKEN} six times",
        )
        assert federation.verdicts(site, BROKEN, "accepted") == 0
        for peer in HONEST:
            if peer != site:
                # Five sites have so few samples that an honest one may be rejected at first.
                accepted = federation.verdicts(site, peer, "accepted")
                assert accepted >= 5, (site, peer)
                assert federation.verdicts(site, peer, "rejected") <= 1, (site, peer)


def test_containers_are_confined(federation: ComposeFederation) -> None:
    for site in ALL:
        assert federation.execute(site, "id", "-u") == "10001"
        for place in ("/x", "/etc/x", "/opt/lightyear-node/x", "/federation/x"):
            refused = federation.engine.run(
                "docker", "exec", federation.container(site), "touch", place
            )
            assert "Read-only file system" in refused.stderr, place
        own = federation.execute(site, "cat", "/proc/1/status")
        assert re.search(r"CapEff:\s+0{16}$", own, re.M)
        assert re.search(r"CapBnd:\s+0{16}$", own, re.M)
        assert re.search(r"NoNewPrivs:\s+1$", own, re.M)
        settings = federation.state(site)["HostConfig"]
        assert settings["Memory"] == 2 << 30
        assert settings["PidsLimit"] == 256


def test_a_killed_site_resumes_its_round_without_equivocation(
    federation: ComposeFederation,
) -> None:
    before = federation.round("site-b")
    federation.engine.docker("kill", federation.container("site-b"))
    state = federation.state("site-b")["State"]
    assert (state["Running"], state["ExitCode"]) == (False, 137)
    federation.engine.docker("start", federation.container("site-b"))
    wait_until(lambda: federation.is_healthy("site-b"), "site-b is healthy again")
    assert federation.round("site-b") >= before
    reached = federation.round("site-a")
    wait_until(lambda: federation.round("site-b") >= reached + 2, "site-b goes on")
    record = federation.execute("site-b", "lightyear-node", "audit", "verify", "--format", "json")
    assert json.loads(record)["status"] == "ok"
    check_no_equivocation(federation)


def test_a_disconnected_site_rejoins_by_itself(federation: ComposeFederation) -> None:
    network = f"{federation.project}_hospitals"
    reachable = 'lightyear_peer_reachable{peer="site-c"}'
    federation.engine.docker("network", "disconnect", network, federation.container("site-c"))
    try:
        wait_until(lambda: federation.metrics("site-a")[reachable] == 0, "site-a misses site-c")
        alone = federation.round("site-a")
        wait_until(lambda: federation.round("site-a") >= alone + 2, "the others go on")
    finally:
        federation.engine.docker(
            "network", "connect", "--alias", "site-c", network, federation.container("site-c")
        )
    wait_until(lambda: federation.metrics("site-a")[reachable] == 1, "site-a sees site-c")
    reached = federation.round("site-a")
    wait_until(lambda: federation.round("site-c") >= reached, "site-c has caught up")
    check_no_equivocation(federation)


def check_no_equivocation(federation: ComposeFederation) -> None:
    for site in HONEST:
        counted = federation.metrics(site)
        accused = {name for name, value in counted.items() if "quarantined" in name and value}
        assert not accused, (site, accused)


def test_prometheus_sees_the_rejected_site(federation: ComposeFederation, tmp_path: Path) -> None:
    """The profile `monitoring`, with Debian's Prometheus if the official image is unavailable."""
    need_tool("prometheus")
    shutil.copy(shutil.which("prometheus") or "", tmp_path / "prometheus")
    (tmp_path / "Dockerfile").write_text(
        f"FROM {federation.engine.base_image}\n"
        "COPY prometheus /usr/bin/prometheus\n"
        'ENTRYPOINT ["/usr/bin/prometheus"]\n'
    )
    federation.engine.docker("build", "-q", "-t", "lightyear-prometheus:test", str(tmp_path))
    federation.compose(
        "up", "-d", "prometheus",
        profiles=("attack", "monitoring"), PROMETHEUS_IMAGE="lightyear-prometheus:test",
    )  # fmt: skip
    rejected = (
        f'sum by (instance) (lightyear_peer_verdicts_total{{peer="{BROKEN}",verdict="rejected"}})'
    )

    def seen() -> dict[str, float]:
        try:
            return query(federation.ports["PROMETHEUS_PORT"], rejected)
        except OSError:
            return {}

    wait_until(lambda: set(HONEST) <= seen().keys(), "every site is scraped")
    assert all(seen()[site] >= 3 for site in HONEST)
    with urllib.request.urlopen(
        f"http://127.0.0.1:{federation.ports['PROMETHEUS_PORT']}/api/v1/rules", timeout=10
    ) as answer:
        groups = json.load(answer)["data"]["groups"]
    names = {rule["name"] for group in groups for rule in group["rules"]}
    rules = (ROOT / "deploy" / "prometheus" / "alerts.rules.yml").read_text()
    assert names >= set(re.findall(r"- alert: (\w+)", rules))


def query(port: str, expression: str) -> dict[str, float]:
    """Return the values by instance."""
    asked = urllib.parse.urlencode({"query": expression})
    url = f"http://127.0.0.1:{port}/api/v1/query?{asked}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        found = json.load(answer)["data"]["result"]
    return {one["metric"]["instance"]: float(one["value"][1]) for one in found}


def test_all_containers_stop_cleanly(federation: ComposeFederation) -> None:
    """Runs last: it stops the sites."""
    federation.check_stopped_cleanly(ALL, "attack")
