"""A host name that does not resolve at first may resolve later."""

from __future__ import annotations

import time
from pathlib import Path

from lightyear_node.lab.federation import Statuses, lay_out, site_names
from tests.support.bad_network_setup import AVERAGE, HASTY, counted, history, readdress
from tests.support.needs import need
from tests.support.network_hosts import PORT, Hosts, why_not
from tests.support.site_queries import DEADLINE_S, A, B, all_finished, check_histories

NAME = "site-b.hospital.test"
"""The domain `test` is reserved."""
UNKNOWN_S = 10.0
"""How long the name is missing: several heartbeats and several DNS queries."""


def state_of_b(statuses: Statuses) -> tuple[str, str]:
    status = statuses[A]
    if status is None:
        return "", ""
    [peer] = status["peers"]
    return peer["state"], peer["about"]


def test_a_peer_whose_name_resolves_later_is_reached_without_a_restart(tmp_path: Path) -> None:
    need(why_not())
    homes = lay_out(tmp_path, site_names(2), rounds=3, barrier=HASTY, rule=AVERAGE)
    with Hosts(homes) as hosts:
        readdress(homes, {A: hosts.address(A), B: f"{NAME}:{PORT}"})
        # Otherwise the peer's own calls would announce its updates, and the name would not matter.
        hosts.block_calls(A, B)
        with hosts.federation() as federation:
            federation.wait_until(lambda s: "cannot be resolved" in state_of_b(s)[1], DEADLINE_S)
            until = time.monotonic() + UNKNOWN_S
            statuses = federation.wait_until(lambda _: time.monotonic() > until, DEADLINE_S)
            assert state_of_b(statuses)[0] == "unreachable"
            pid = federation.pid(A)

            hosts.set_hosts_file(A, f"{hosts.ip(B)} {NAME}\n")
            named_at = time.monotonic()
            federation.wait_until(lambda s: state_of_b(s)[0] == "reachable", DEADLINE_S)
            print(f"found {time.monotonic() - named_at:.1f} s after the name appeared")
            hosts.heal()
            federation.wait_until(all_finished, DEADLINE_S)
            assert federation.pid(A) == pid
            for name in (A, B):
                assert counted(hosts.metrics(name), "peer_refusals") == 0
                # Not in each round: an update that a faster peer sealed early is merged only once.
                accepted = [one["verdicts"][0]["accepted"] for one in federation.rounds(name)]
                assert any(accepted), accepted
    check_histories(hosts.homes, history)
