"""Networks with high latency or low bandwidth."""

from __future__ import annotations

import time
from pathlib import Path

from lightyear_node.config.federation import BarrierConfig
from lightyear_node.lab.federation import Federation, lay_out, site_names
from tests.support.bad_network_setup import (
    AVERAGE,
    MIB,
    behind_proxies,
    counted,
    history,
    lay_out_heavy,
    part_bytes,
    readdress,
)
from tests.support.needs import need
from tests.support.network_hosts import Hosts, why_not
from tests.support.site_queries import (
    DEADLINE_S,
    A,
    B,
    C,
    all_finished,
    check_histories,
    metrics_of,
)

ARRIVED = 'lightyear_transfer_uncompressed_bytes_total{direction="received",peer="site-c"}'
FAR = BarrierConfig(heartbeat=0.5, grace=10.0, suspect=10.0, observe=2.0)

NARROW = BarrierConfig(
    min_peers=1, faulty_max=0, heartbeat=0.5, grace=2.0, suspect=30.0, observe=2.0
)


def test_sites_with_high_latency_finish_their_rounds(tmp_path: Path) -> None:
    """One-way latency 75 ms ± 50."""
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
            # No update is late for a round.  An early one is merged early, and only once: if rounds
            # are as short as the round-trip time, a site runs ahead of the others.
            assert all(one["accepted"] or one["reason"] == "stale_round" for one in verdicts)
            assert sum(one["accepted"] for one in verdicts) >= len(verdicts) // 2
    check_histories(homes, history)


def test_an_update_arrives_over_a_1_mbit_s_link(tmp_path: Path) -> None:
    """The others' rounds continue, and they do not report the slow site as silent."""
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
            for name in (A, B, C):  # a chunk takes 17 s, and may take 60 s
                metrics = hosts.metrics(name)
                for reason in ("timeout", "truncated"):
                    assert counted(metrics, "transfer_errors", reason=reason) == 0
                assert counted(metrics, "peer_refusals") == 0
                assert counted(metrics, "peer_calls_denied", reason="slow_reader") == 0
    check_histories(hosts.homes, history)
    for home in homes[:2]:
        assert "site-c is silent" not in home.log.read_text()
