"""A site without a reachable port: it opens all connections, and peers call it over them."""

from __future__ import annotations

import psutil

from lightyear_node.config.federation import RuleConfig
from lightyear_node.lab.federation import Federation
from tests.support.site_queries import (
    DEADLINE_S,
    PATIENT,
    A,
    B,
    C,
    LayOut,
    check_as_simulated,
    check_histories,
    run_in_lockstep,
)


def test_only_one_side_of_each_pair_needs_a_port(lay_out_sites: LayOut, records: object) -> None:
    """All calls use the third site's connections, and the results are bit-identical."""
    rounds = 4
    homes = lay_out_sites(3, rounds=1, barrier=PATIENT, unreachable=[C])
    with Federation(homes) as federation:
        federation.wait_until(lambda s: s[C] is not None and s[C]["round"] > 0, DEADLINE_S)
        process = psutil.Process(federation.pid(C))
        listening = [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        # Metrics and health, on loopback; nothing for peers.
        assert [f"{c.laddr.ip}:{c.laddr.port}" for c in listening] == [homes[2].http_address]
        statuses = run_in_lockstep(federation, rounds)
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
        check_as_simulated(federation, RuleConfig(), rounds)
    check_histories(homes, records)  # type: ignore[arg-type]
    for home in homes:
        assert "Traceback" not in home.log.read_text()
