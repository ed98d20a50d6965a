"""Networks that are slow: far away, or narrow."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from asking import DEADLINE_S, A, B, C, all_finished, check_histories, metrics_of
from hosts import Hosts, why_not
from needs import need
from staging import (
    AVERAGE,
    MIB,
    behind_proxies,
    counted,
    history,
    lay_out_heavy,
    part_bytes,
    readdress,
)

from lightyear_node.config.agreement import BarrierTerms
from lightyear_node.lab.federation import Federation, lay_out, site_names

ARRIVED = 'lightyear_transfer_uncompressed_bytes_total{direction="received",peer="site-c"}'
FAR = BarrierTerms(heartbeat=0.5, grace=10.0, suspect=10.0, observe=2.0)

NARROW = BarrierTerms(
    min_peers=1, faulty_max=0, heartbeat=0.5, grace=2.0, suspect=30.0, observe=2.0
)


@pytest.mark.slow
def test_far_away_sites_finish_their_rounds(tmp_path: Path) -> None:
    """75 ms each way, give or take 50."""
    rounds = 5
    homes = lay_out(tmp_path, site_names(3), rounds=rounds, barrier=FAR, rule=AVERAGE)
    with behind_proxies(homes) as proxies, Federation(homes) as federation:
        for proxy in proxies.values():
            proxy.delay_s, proxy.jitter_s = 0.075, 0.05
        federation.wait_until(all_finished, DEADLINE_S)
        for home in homes:
            metrics = metrics_of(home)
            assert counted(metrics, "peer_refusals") == 0
            assert counted(metrics, "transfer_errors") == 0
            verdicts = [
                one for closed in federation.rounds(home.name) for one in closed["verdicts"]
            ]
            # Nobody is too late for a round.  Who is early is used early, and only once: rounds
            # that take no longer than the way there and back make a site run ahead of the others.
            assert all(one["accepted"] or one["reason"] == "stale_round" for one in verdicts)
            assert sum(one["accepted"] for one in verdicts) >= len(verdicts) // 2
    check_histories(homes, history)


@pytest.mark.slow
def test_an_update_arrives_over_1_mbit_s_however_long_it_takes(tmp_path: Path) -> None:
    """The others' rounds go on meanwhile, and nobody takes a slow site for a silent one."""
    need(why_not())
    mib = 2
    homes = lay_out_heavy(tmp_path, 3, mib=mib, rounds=5000, barrier=NARROW)
    with Hosts(homes) as hosts:
        readdress(homes, {name: hosts.address(name) for name in (A, B, C)})
        hosts.slow_down(C, "1mbit")
        with hosts.federation() as federation:
            federation.wait_until(lambda _: part_bytes(homes[0]) > 0, DEADLINE_S)
            began, first = time.monotonic(), len(federation.rounds(A))
            federation.wait_until(
                lambda _: all(hosts.metrics(name)[ARRIVED] >= mib * MIB for name in (A, B)),
                DEADLINE_S,
            )
            took_s = time.monotonic() - began
            passed = len(federation.rounds(A)) - first
            print(f"{mib} MiB for two peers took {took_s:.1f} s, and {passed} rounds")
            assert passed >= 3
            for name in (A, B, C):
                metrics = hosts.metrics(name)
                assert counted(metrics, "transfer_errors", reason="timeout") == 0
                assert counted(metrics, "transfer_errors", reason="truncated") == 0
                assert counted(metrics, "peer_refusals") == 0
                assert counted(metrics, "peer_calls_denied", reason="slow_reader") == 0
    check_histories(hosts.homes, history)
    for home in homes[:2]:
        assert "site-c is silent" not in home.log.read_text()
