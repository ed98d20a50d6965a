"""Real nodes with a shadow: the comparison is recorded, shown, exported, and survives a kill."""

from __future__ import annotations

import json
from pathlib import Path

import lightyear_node.cli.model
import lightyear_node.cli.status  # noqa: F401
from lightyear_node.config.federation import RuleConfig
from lightyear_node.lab.federation import Federation
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.types import Worth
from tests.support.cli_runner import data_of, output_of
from tests.support.site_queries import (
    DEADLINE_S,
    PATIENT,
    A,
    B,
    C,
    LayOut,
    Records,
    check_histories,
    metrics_of,
    run_in_lockstep,
)

ROUNDS = 5
HARMFUL = RuleConfig(guard=False, shadow=True)
"""Without guard and merge check a flipped final layer is merged."""


def test_a_harmed_site_serves_the_model_trained_alone(
    lay_out_sites: LayOut, records: Records, tmp_path: Path
) -> None:
    bad = MalfunctionConfig(kind="head-flip")
    homes = lay_out_sites(rounds=1, malfunctions={B: bad, C: bad}, barrier=PATIENT, rule=HARMFUL)
    home = homes[0]

    def kill_once(configured: int) -> None:
        if configured == 3:
            federation.kill(A)
            federation.wait_for_exit(A)
            federation.start(A)
            federation.wait_until(lambda statuses: statuses[A] is not None, DEADLINE_S)

    with Federation(homes) as federation:
        run_in_lockstep(federation, ROUNDS, kill_once)
        entries = federation.rounds(A)
        found = [Worth.from_plain(entry["worth"]) for entry in entries]
        # The comparison of earlier rounds was read again after the kill.
        assert [len(worth.recent) for worth in found] == [1, 2, 3, 4, 4]
        assert found[3].recent[:3] == found[2].recent
        last = found[-1]
        assert (last.served, last.gain < -0.1) == ("alone", True)
        assert last.alone["accuracy"] > entries[-1]["merged"]["accuracy"] + 0.1
        status = federation.status()[A]
        assert status is not None
        assert status["worth"] == {"round": ROUNDS - 1, **json.loads(json.dumps(last.to_plain()))}
        counted = metrics_of(home)
        assert counted["lightyear_serving_federated"] == 0
        assert counted['lightyear_federation_gain{value="mean"}'] == last.gain
        shown = " ".join(output_of("status", "--home", str(home.directory)).split())
        assert "serving the one alone" in shown
        out = tmp_path / "model.safetensors"
        export = ("model", "export", "--home", str(home.directory), "--round", "best")
        assert data_of(*export, "-o", str(out))["which"] == "alone"
    assert "federated against alone" in home.log.read_text()
    check_histories(homes, records)
