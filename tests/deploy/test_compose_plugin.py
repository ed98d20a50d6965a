"""`docker compose up --build` as in docker/README.md: the plugin and BuildKit."""

from __future__ import annotations

import json

import pytest

from tests.support.containers import HONEST, PLUGIN, ComposeFederation
from tests.support.docker_engine import Engine
from tests.support.needs import need
from tests.support.waiting import wait_until

ROUNDS = 20


@pytest.mark.usefixtures("wheelhouse")
def test_four_sites_finish_without_a_rejection(engine: Engine) -> None:
    for plugin in ("compose", "buildx"):
        found = engine.run("docker", plugin, "version").returncode == 0
        need(None if found else f"docker has no plugin `{plugin}`")
    sites = ComposeFederation(engine, "lightyear-node:plugin", PLUGIN, "lightyear-plugin", ROUNDS)
    try:
        sites.compose("up", "--build", "-d")
        for site in HONEST:
            wait_until(
                lambda site=site: sites.is_healthy(site) and sites.status(site)["finished"],
                f"{site} has finished",
            )
        for site in HONEST:
            output = sites.execute(site, "lightyear-node", "rounds", "list", "--format", "json")
            rounds = json.loads(output)["data"]
            assert len(rounds) == ROUNDS
            assert not [one for one in rounds if one["rejected"]], site
            # On a busy machine, an update may be late for a round.
            complete = [one for one in rounds if one["accepted"] == len(HONEST) - 1]
            assert len(complete) >= ROUNDS - 2, site
        sites.check_stopped_cleanly(HONEST)
    finally:
        sites.compose("down", "-v", "--timeout", "30")
