"""`status --watch` of real nodes: a slow transfer, and a node that is killed."""

from __future__ import annotations

from pathlib import Path

from lightyear_node.lab.federation import Federation, Statuses
from tests.support.bad_network_setup import MIB, behind_proxies, lay_out_heavy
from tests.support.site_queries import DEADLINE_S, A, B
from tests.support.terminal import Terminal

UPDATE_MIB = 24
RATE_BYTES_S = 2 * MIB


def is_transferring(statuses: Statuses) -> bool:
    status = statuses[A]
    return status is not None and any(one["rate"] for one in status["transfers"])


def test_an_operator_watches_a_transfer_and_a_restart(tmp_path: Path) -> None:
    homes = lay_out_heavy(tmp_path, 2, mib=UPDATE_MIB, rounds=50)
    with behind_proxies(homes) as proxies, Federation(homes) as federation:
        for proxy in proxies.values():
            proxy.rate_bytes_s = RATE_BYTES_S
        statuses = federation.wait_until(is_transferring, DEADLINE_S)
        assert statuses[A] is not None
        [transfer] = statuses[A]["transfers"]
        assert transfer["peer"] == B
        assert 0 < transfer["done"] <= transfer["total"]
        assert transfer["total"] >= UPDATE_MIB * MIB
        # Compressed data arrives faster than the link's rate.
        assert transfer["rate"] < 4 * RATE_BYTES_S
        watch = ("status", "--watch", "--interval", "0.2")
        with Terminal(*watch, cwd=homes[0].directory) as terminal:
            at = terminal.wait_for("site-a in demo", f"from {B}", "MiB/s", "left")
            federation.kill(A)
            federation.wait_for_exit(A)
            at = terminal.wait_for("gone since", since=at)
            federation.start(A)
            at = terminal.wait_for("q or Ctrl-C", f"from {B}", since=at)
            terminal.type("q")
            assert terminal.exit_code() == 0
            assert terminal.settings() == terminal.before
