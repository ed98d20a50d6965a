"""The records of real nodes: signed, sound, explained, and the same at every site."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from asking import DEADLINE_S, A, B, C, LayOut, all_finished

from lightyear_node.config.site import Malfunction
from lightyear_node.lab.federation import Federation, SiteHome, package_environment

ROUNDS = 2


def told(home: SiteHome, *words: str) -> Any:
    """The data of a command, run as an operator would; it has to end with 0."""
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


def test_what_nodes_record_holds_and_agrees(lay_out_sites: LayOut) -> None:
    homes = lay_out_sites(rounds=ROUNDS, malfunctions={C: Malfunction(kind="sfa")})
    with Federation(homes) as federation:
        federation.wait_until(all_finished, DEADLINE_S)
        running = [told(home, "audit", "verify") for home in homes]
    for home, before in zip(homes, running, strict=True):
        after = told(home, "audit", "verify")
        assert after == before
        assert (after["site"], after["rounds"], after["signed"]) == (home.name, ROUNDS, ROUNDS)
    for left, right in ((0, 1), (0, 2), (1, 2)):
        other = str(homes[right].directory)
        found = told(homes[left], "audit", "compare", ".", other)
        assert found["rounds"] == ROUNDS
        assert found["updates"] >= ROUNDS
    explained = told(homes[0], "explain", "--round", str(ROUNDS - 1), "--peer", C)
    assert (explained["fate"], explained["reason"]) == ("rejected", "too_far")
    distance = explained["guard"][0]
    assert distance["value"] > distance["limit"]
    assert [entry["round"] for entry in told(homes[0], "rounds", "list")] == list(range(ROUNDS))
    assert {home.name for home in homes} == {A, B, C}
