"""Connections and processes that break during a transfer: received bytes are kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lightyear_node.lab.federation import Federation, SiteHome, Statuses
from lightyear_node.types import PeerName
from tests.support.bad_network_proxy import ChaosProxy
from tests.support.bad_network_setup import (
    MIB,
    behind_proxies,
    counted,
    history,
    lay_out_heavy,
    opens_no_part,
    part_bytes,
)
from tests.support.site_queries import DEADLINE_S, A, B, all_finished, check_histories, metrics_of

UPDATE_MIB = 32
WIRE_BYTES = 0.85 * UPDATE_MIB * MIB
"""Approximate compressed size."""
RATE_BYTES_S = 8 * MIB
AGAIN_MAX = 1.3
"""Bytes on the wire per update size, however often the connection breaks."""


def grown(home: SiteHome, mib: int) -> Callable[[Statuses], bool]:
    return lambda _: part_bytes(home) >= mib * MIB


class Growth:
    """Checks that a partial file never shrinks."""

    def __init__(self, home: SiteHome) -> None:
        self.home = home
        self.most = 0

    def watch(self, statuses: Statuses) -> None:
        opens_no_part(statuses)
        size = part_bytes(self.home)
        assert size == 0 or size >= self.most, "the partial file was discarded"
        self.most = max(self.most, size)


@pytest.mark.parametrize("killed", [B, A], ids=["sender", "receiver"])
def test_a_transfer_resumes_after_sigkill(tmp_path: Path, killed: PeerName) -> None:
    homes = lay_out_heavy(tmp_path, 2, mib=UPDATE_MIB, rounds=1)
    receiver = homes[0]
    with behind_proxies(homes) as proxies, Federation(homes) as federation:
        for proxy in proxies.values():
            proxy.rate_bytes_s = RATE_BYTES_S
        federation.wait_until(grown(receiver, UPDATE_MIB // 2), DEADLINE_S)
        federation.kill(killed)
        federation.wait_for_exit(killed)
        growth = Growth(receiver)
        kept = growth.most = part_bytes(receiver)
        assert UPDATE_MIB // 2 * MIB <= kept < UPDATE_MIB * MIB, (
            "it must be killed during the transfer"
        )
        federation.start(killed)
        statuses = federation.wait_until(all_finished, DEADLINE_S, growth.watch)
        assert statuses[A] is not None
        [closed] = federation.rounds(A)
        assert [(one["peer"], one["accepted"]) for one in closed["verdicts"]] == [(B, True)]
        share = proxies[B].counts.from_target / WIRE_BYTES
        print(f"killed at {kept / MIB:.1f} of {UPDATE_MIB} MiB; {share:.2f} updates on the line")
        assert share < AGAIN_MAX
        if killed == A:
            received = statuses[A]["bytes"]["raw"]
            assert received <= UPDATE_MIB * MIB - kept + 2 * MIB, "only the rest was fetched"
        for home in homes:
            assert counted(metrics_of(home), "peer_refusals") == 0
    check_histories(homes, history)
    for home in homes:
        assert not list((home.state_dir / "updates").glob("*.part"))
        assert "Traceback" not in home.log.read_text()


def test_connection_resets_cost_little_and_count_against_no_peer(tmp_path: Path) -> None:
    homes = lay_out_heavy(tmp_path, 2, mib=UPDATE_MIB, rounds=1)
    receiver = homes[0]
    growth = Growth(receiver)
    with behind_proxies(homes) as proxies, Federation(homes) as federation:
        for proxy in proxies.values():
            proxy.rate_bytes_s = RATE_BYTES_S
        line = proxies[B]
        for mib, reset in ((4, True), (10, False), (16, True), (22, True)):
            federation.wait_until(grown(receiver, mib), DEADLINE_S, growth.watch)
            assert line.cut(reset=reset) > 0
        federation.wait_until(grown(receiver, 24), DEADLINE_S, growth.watch)

        # It breaks before any chunk is complete: the fetch is retried at the next heartbeat.
        line.rate_bytes_s, line.cut_every_s = MIB // 2, 0.5
        federation.wait_until(lambda _: truncated(receiver) > 0, DEADLINE_S, growth.watch)
        dialled = line.counts.connections
        failures = truncated(receiver)
        federation.wait_until(
            lambda _: truncated(receiver) >= failures + 2, DEADLINE_S, growth.watch
        )
        per_failure = (line.counts.connections - dialled) / 2
        line.rate_bytes_s, line.cut_every_s = RATE_BYTES_S, None

        federation.wait_until(all_finished, DEADLINE_S, growth.watch)
        share = line.counts.from_target / WIRE_BYTES
        print(
            f"{line.counts.cuts} cuts: {share:.2f} updates on the line,"
            f" {truncated(receiver):.0f} fetches given up, {per_failure:.1f} connections for each"
        )
        assert share < AGAIN_MAX + 0.5
        assert per_failure < 40
        for home in homes:
            assert counted(metrics_of(home), "peer_refusals") == 0
        assert federation.rounds(A)[0]["verdicts"][0]["accepted"]
    check_histories(homes, history)
    for home in homes:
        assert "Traceback" not in home.log.read_text()


def truncated(home: SiteHome) -> float:
    return counted(metrics_of(home), "transfer_errors", peer=B, reason="truncated")


def test_a_middlebox_that_corrupts_bytes_costs_only_a_connection(tmp_path: Path) -> None:
    rounds = 4
    homes = lay_out_heavy(tmp_path, 2, mib=8, rounds=rounds)
    receiver = homes[0]
    with behind_proxies(homes) as proxies, Federation(homes) as federation:
        line = proxies[B]
        line.rate_bytes_s = 2 * MIB
        federation.wait_until(grown(receiver, 2), DEADLINE_S)
        corrupt(federation, line, line.flip_from_target)
        federation.wait_until(grown(receiver, 4), DEADLINE_S)
        corrupt(federation, line, line.flip_to_target)
        line.rate_bytes_s = None
        federation.wait_until(
            lambda s: s[A] is not None and s[A]["round"] >= 1, DEADLINE_S, opens_no_part
        )
        corrupt(federation, line, line.flip_from_target)
        federation.wait_until(all_finished, DEADLINE_S)
        for home in homes:
            metrics = metrics_of(home)
            assert counted(metrics, "peer_refusals") == 0
            assert counted(metrics, "transfer_errors", reason="checksum") == 0
            for closed in federation.rounds(home.name):
                assert "rejected" not in str(closed["verdicts"])
        assert federation.rounds(A)[-1]["verdicts"][0]["accepted"]
    check_histories(homes, history)
    for home in homes:
        assert "Traceback" not in home.log.read_text()


def corrupt(federation: Federation, line: ChaosProxy, flip: Callable[[], None]) -> None:
    """Corrupt one byte, and wait until the connection is replaced."""
    before = line.counts.connections
    flip()
    federation.wait_until(lambda _: line.counts.connections > before, DEADLINE_S)
