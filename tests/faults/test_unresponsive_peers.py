"""A peer that neither answers nor closes connections, like a suspended virtual machine."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from lightyear_node.lab.federation import Federation, SiteHome
from lightyear_node.observe.admin_socket import ask
from tests.support.bad_network_setup import MIB, behind_proxies, counted, history, lay_out_heavy
from tests.support.site_lives import wait_for
from tests.support.site_queries import DEADLINE_S, C, all_finished, check_histories, metrics_of

NOTICED_S = 30.0
ENDED_S = 35.0
"""Connections end 28 s after the last byte, plus some load."""
GIVEN_UP_S = 60.0
"""A transfer with all its retries."""


def seen_by(home: SiteHome) -> tuple[str, int]:
    """Return how a site sees the suspended one, and its own round."""
    status = ask(home.state_dir, "status")
    [state] = [peer["state"] for peer in status["peers"] if peer["name"] == C]
    return state, status["round"]


def transfer_is_under_way(receiver: SiteHome, sender: SiteHome) -> bool:
    """Tell whether a transfer is under way; the sender may have newer updates already."""
    sealed = [one.body["update"]["digest"] for one in history(sender) if one.kind == "seal"]
    parts = [receiver.state_dir / "updates" / f"{digest}.part" for digest in sealed]
    return any(part.is_file() and part.stat().st_size >= 2 * MIB for part in parts)


def test_an_unresponsive_peer_is_detected_and_rejoins(tmp_path: Path) -> None:
    rounds = 60
    homes = lay_out_heavy(tmp_path, 3, mib=4, rounds=rounds)
    a, b, c = homes
    with behind_proxies(homes) as proxies, Federation(homes) as federation:
        proxies[C].rate_bytes_s = MIB
        federation.wait_until(
            lambda s: s[C] is not None and transfer_is_under_way(a, c), DEADLINE_S
        )
        federation.kill(C, signal.SIGSTOP)
        stopped_at = time.monotonic()
        proxies[C].rate_bytes_s = None  # otherwise buffered bytes would arrive
        broken = f"the connection to {proxies[C].address} broke"

        noticed_at = wait_for(lambda: all(seen_by(home)[0] == "unreachable" for home in (a, b)))
        broken_at = wait_for(lambda: broken in a.log.read_text())
        given_up_at = wait_for(lambda: counted(metrics_of(a), "transfer_errors", peer=C) > 0)
        noticed_s, broken_s, given_up_s = (
            at - stopped_at for at in (noticed_at, broken_at, given_up_at)
        )
        print(
            f"noticed after {noticed_s:.1f} s; its connection ended after {broken_s:.1f} s,"
            f" the transfer after {given_up_s:.1f} s"
        )
        assert noticed_s < NOTICED_S
        assert broken_s < ENDED_S
        assert given_up_s < GIVEN_UP_S
        assert metrics_of(a)['lightyear_peer_reachable{peer="site-c"}'] == 0
        assert "is the machine there paused" in a.log.read_text()
        wait_for(lambda: all(seen_by(home)[1] == rounds for home in (a, b)))

        federation.kill(C, signal.SIGCONT)
        woken_at = time.monotonic()
        federation.wait_until(all_finished, DEADLINE_S)
        print(f"caught up {time.monotonic() - woken_at:.1f} s after waking")
        wait_for(lambda: all(seen_by(home)[0] == "reachable" for home in (a, b)))
        assert len(federation.rounds(C)) < rounds, "it skipped the rounds that it had missed"
        for home in homes:
            assert counted(metrics_of(home), "peer_refusals") == 0
    check_histories(homes, history)
    for home in homes:
        assert "Traceback" not in home.log.read_text()
