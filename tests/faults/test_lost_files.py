"""Peers' files are missing when a decision is executed: the round ends without them."""

from __future__ import annotations

from pathlib import Path

from tests.faults.test_kills import lay_out_three
from tests.support.bad_network_setup import history
from tests.support.site_lives import FailpointFederation, KilledSite, all_in_round, train_until
from tests.support.site_queries import DEADLINE_S, C, durable_values


def test_a_decision_whose_files_are_lost_does_not_stop_the_node(tmp_path: Path) -> None:
    """The site dies between decision and merge; when it restarts, no other site is running."""
    homes = lay_out_three(tmp_path / "sites")
    home, others = homes[2], homes[:2]
    train_until(homes, -1)
    with FailpointFederation(homes) as federation:
        train_until(homes, 0)
        federation.wait_until(all_in_round(1), DEADLINE_S)
        killed = KilledSite(federation, home)
        killed.kill()
        train_until(homes, 1)
        killed.run_until("after:decision")
        decision = durable_values(home)["barrier"]["decision"]
        accepted = {update["peer"]: update["digest"] for update in decision["accepted"]}
        assert accepted.keys() == {one.name for one in others}
        for one in others:
            federation.kill(one.name)
            federation.wait_for_exit(one.name)
        lost = {others[0].name: b"", others[1].name: b"rubbish"}
        for peer, content in lost.items():
            (home.state_dir / "updates" / accepted[peer]).write_bytes(content)
        federation.start(C)
        federation.wait_until(lambda s: s[C] is not None and s[C]["round"] == 2, DEADLINE_S)
    [commit] = [one for one in history(home) if one.kind == "commit" and one.round == 1]
    assert commit.body["left_out"] == sorted(lost)
    [decided] = [one for one in history(home) if one.kind == "decision" and one.round == 1]
    assert {update["peer"] for update in decided.body["accepted"]} == lost.keys()
    assert "Traceback" not in home.log.read_text()
