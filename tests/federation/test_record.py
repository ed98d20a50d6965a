"""The journals of real nodes: signed, valid, explained, and consistent between sites."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from lightyear_node.lab.federation import Federation, SiteHome, package_environment
from lightyear_node.lab.malfunctions import MalfunctionConfig
from tests.support.site_queries import DEADLINE_S, A, B, C, LayOut, all_finished

ROUNDS = 2


def command_data(home: SiteHome, *words: str) -> Any:
    """Run a command as an operator would, expecting exit code 0; return its data."""
    ended = subprocess.run(
        [sys.executable, "-m", "lightyear_node", *words, "--format", "json"],
        cwd=home.directory,
        env=package_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(ended.stdout)["data"]


def test_journals_of_nodes_verify_and_agree(lay_out_sites: LayOut) -> None:
    homes = lay_out_sites(rounds=ROUNDS, malfunctions={C: MalfunctionConfig(kind="sfa")})
    with Federation(homes) as federation:
        federation.wait_until(all_finished, DEADLINE_S)
        running = [command_data(home, "audit", "verify") for home in homes]
    for home, before in zip(homes, running, strict=True):
        after = command_data(home, "audit", "verify")
        assert after == before
        assert (after["site"], after["rounds"], after["signed"]) == (home.name, ROUNDS, ROUNDS)
    for left, right in ((0, 1), (0, 2), (1, 2)):
        other = str(homes[right].directory)
        found = command_data(homes[left], "audit", "compare", ".", other)
        assert found["rounds"] == ROUNDS
        assert found["updates"] >= ROUNDS
    explained = command_data(homes[0], "explain", "--round", str(ROUNDS - 1), "--peer", C)
    assert (explained["fate"], explained["reason"]) == ("rejected", "too_far")
    distance = explained["guard"][0]
    assert distance["value"] > distance["limit"]
    assert [entry["round"] for entry in command_data(homes[0], "rounds", "list")] == list(
        range(ROUNDS)
    )
    assert {home.name for home in homes} == {A, B, C}
