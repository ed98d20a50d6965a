"""`status --watch` of real nodes: an update on a narrow line, a node that is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from asking import DEADLINE_S, A, B
from staging import MIB, behind_proxies, lay_out_heavy

from lightyear_node.lab.federation import Federation, Statuses
from tests.unit.terminal import Terminal

UPDATE_MIB = 24
RATE_BYTES_S = 2 * MIB


def coming(statuses: Statuses) -> bool:
    status = statuses[A]
    return status is not None and any(one["rate"] for one in status["transfers"])


@pytest.mark.slow
def test_an_operator_watches_a_transfer_and_a_restart(tmp_path: Path) -> None:
    homes = lay_out_heavy(tmp_path, 2, mib=UPDATE_MIB, rounds=50)
    with behind_proxies(homes) as proxies, Federation(homes) as federation:
        for proxy in proxies.values():
            proxy.rate_bytes_s = RATE_BYTES_S
        statuses = federation.wait_until(coming, DEADLINE_S)
        assert statuses[A] is not None
        [transfer] = statuses[A]["transfers"]
        assert transfer["peer"] == B
        assert 0 < transfer["done"] <= transfer["total"]
        assert transfer["total"] >= UPDATE_MIB * MIB
        # What is compressed arrives somewhat faster than the line is.
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
