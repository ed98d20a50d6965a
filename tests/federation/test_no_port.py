"""A site that nobody can reach: it opens all connections itself, and is called over them."""

from __future__ import annotations

import psutil
from asking import (
    DEADLINE_S,
    PATIENT,
    A,
    B,
    C,
    LayOut,
    all_finished,
    check_as_simulated,
    check_histories,
    check_in_step,
    repeated_when_out_of_step,
)

from lightyear_node.config.agreement import RuleTerms
from lightyear_node.lab.federation import Federation


@repeated_when_out_of_step
def test_of_each_pair_only_one_side_needs_a_port(lay_out_sites: LayOut, records: object) -> None:
    """All of it over lines that the third site lends; and not a bit is different for that."""
    rounds = 4
    homes = lay_out_sites(3, rounds=rounds, barrier=PATIENT, unreachable=[C])
    with Federation(homes) as federation:
        federation.wait_until(lambda s: s[C] is not None and s[C]["round"] > 0, DEADLINE_S)
        process = psutil.Process(federation.pid(C))
        listening = [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        # Metrics and health, on loopback; nothing for peers.
        assert [f"{c.laddr.ip}:{c.laddr.port}" for c in listening] == [homes[2].http_address]
        statuses = federation.wait_until(all_finished, DEADLINE_S)
        check_in_step(federation)
        for name in (A, B):
            status = statuses[name]
            assert status is not None
            [seen] = [peer for peer in status["peers"] if peer["name"] == C]
            assert (seen["state"], seen["about"]) == ("reachable", "")
            accepted = [
                verdict["accepted"]
                for entry in federation.rounds(name)
                for verdict in entry["verdicts"]
                if verdict["peer"] == C
            ]
            assert len(accepted) == rounds
            assert any(accepted)
        check_as_simulated(federation, RuleTerms(), rounds)
    check_histories(homes, records)  # type: ignore[arg-type]
    for home in homes:
        assert "Traceback" not in home.log.read_text()
