"""What others can see of a node: metrics, health, the admin socket, the log."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import stat
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from lightyear_node.barrier import Phase
from lightyear_node.errors import ConfigError
from lightyear_node.observe import log
from lightyear_node.observe.admin import SOCKET_NAME, AdminServer, NotRunning, ask
from lightyear_node.observe.http import HttpServer, health_route, metrics_route
from lightyear_node.observe.metrics import Metrics
from lightyear_node.observe.observer import Observer
from lightyear_node.observe.peers import PeerView
from lightyear_node.records import (
    Attempt,
    Digest,
    Harm,
    PeerName,
    Reason,
    Round,
    Transfer,
    Verdict,
)

B, C = PeerName("site-b"), PeerName("site-c")
DIGEST = Digest("0" * 64)


def observer(stream: io.StringIO | None = None) -> Observer:
    logger = logging.Logger("test")
    if stream is not None:
        logger.addHandler(logging.StreamHandler(stream))
    metrics = Metrics([B, C], [*Phase, "starting"], "1.2.3", 20)
    return Observer(metrics, logger, {B: PeerView(), C: PeerView()}, 0.6)


def sample(observed: Observer, series: str) -> float:
    lines = generate_latest(observed.metrics.registry).decode().splitlines()
    [value] = [line.rpartition(" ")[2] for line in lines if line.rpartition(" ")[0] == series]
    return float(value)


def test_one_decision_feeds_log_metrics_and_status() -> None:
    stream = io.StringIO()
    watched = observer(stream)
    verdicts = [
        Verdict(B, True, Reason.OK, score=0.91, weight=0.5, digest=DIGEST),
        Verdict(C, False, Reason.TOO_FAR, score=0.72, digest=DIGEST),
    ]
    watched.decided(Round(3), "all 2 peers delivered", verdicts)
    watched.decided(Round(4), "grace over", [verdicts[0], Verdict(C, False, Reason.UNREACHABLE)])
    assert "site-c REJECTED as too_far (agreement 0.72)" in stream.getvalue()
    assert "site-c missing (unreachable)" in stream.getvalue()
    far = 'peer="site-c",reason="too_far",verdict="rejected"'
    assert sample(watched, f"lightyear_peer_verdicts_total{{{far}}}") == 1
    gone = 'peer="site-c",reason="unreachable",verdict="missing"'
    assert sample(watched, f"lightyear_peer_verdicts_total{{{gone}}}") == 1
    assert sample(watched, 'lightyear_peer_agreement{peer="site-b"}') == 0.91
    assert sample(watched, "lightyear_peers_accepted") == 1
    b, c = watched.status()["peers"]
    assert (b["verdict"], b["agreement"], b["verdict_round"]) == ("accepted", 0.91, 4)
    # Who is missing is not rejected, and its last score stays to be seen.
    assert (c["verdict"], c["reason"], c["agreement"]) == ("missing", "unreachable", 0.72)
    assert c["rejected_in_a_row"] == 0


def test_who_is_left_out_of_a_merge_is_told_counted_and_shown() -> None:
    stream = io.StringIO()
    watched = observer(stream)
    for peer in (B, C):
        assert sample(watched, f'lightyear_merge_dropped_total{{peer="{peer}"}}') == 0
    assert sample(watched, "lightyear_aggregate_reverts_total") == 0
    tried = (Attempt((), 0.9), Attempt((C,), 0.42))
    watched.committed(Round(3), "m", {}, Harm(0.5, 0.4, tried, (C,), kept_local=False))
    assert "left site-c out of the merge: with everybody our validation loss" in stream.getvalue()
    assert "from 0.4 to 0.9, above the limit of 0.5" in stream.getvalue()
    shown = watched.status()["harm"]
    assert (shown["round"], shown["dropped"], shown["kept_local"]) == (3, (C,), False)
    alone = Harm(0.5, 0.4, tried[:1], (C, B), kept_local=True)
    watched.committed(Round(4), "m", {}, alone)
    assert "round 4: kept our own model" in stream.getvalue()
    assert sample(watched, 'lightyear_merge_dropped_total{peer="site-b"}') == 1
    assert sample(watched, 'lightyear_merge_dropped_total{peer="site-c"}') == 2
    assert sample(watched, "lightyear_aggregate_reverts_total") == 1


def test_a_harmless_merge_is_no_news() -> None:
    stream = io.StringIO()
    watched = observer(stream)
    watched.committed(Round(3), "m", {}, Harm(0.5, 0.4, (Attempt((), 0.3),), (), kept_local=False))
    assert "harm" not in stream.getvalue()
    assert watched.status()["harm"]["tried"] == ({"without": (), "loss": 0.3},)
    watched.committed(Round(4), "m", {})
    assert watched.status()["harm"] is None


def test_a_streak_of_rejections_is_counted_and_ends() -> None:
    watched = observer()
    bad = Verdict(C, False, Reason.TOO_FAR, score=0.5, digest=DIGEST)
    for number in range(3):
        watched.decided(Round(number), "all", [bad])
    assert sample(watched, 'lightyear_peer_consecutive_rejections{peer="site-c"}') == 3
    watched.decided(Round(3), "all", [Verdict(C, True, Reason.OK, score=0.9, digest=DIGEST)])
    assert sample(watched, 'lightyear_peer_consecutive_rejections{peer="site-c"}') == 0


def test_a_steady_state_logs_nothing() -> None:
    stream = io.StringIO()
    watched = observer(stream)
    for left in range(30, 0, -1):
        watched.at(Round(2), "collecting", f"round 2: waiting for site-b (closing in {left} s)")
        watched.reached(B, 2, "training")
        watched.unreachable(C, "connection refused")
    assert len(stream.getvalue().splitlines()) == 3


def test_a_link_that_works_one_way_is_said_once() -> None:
    """The peer calls us at every heartbeat, and every call of ours fails."""
    stream = io.StringIO()
    watched = observer(stream)
    for _ in range(10):
        watched.called(B, 2, "training")
        watched.unreachable(B, "connection refused")
    assert len(stream.getvalue().splitlines()) == 2  # reachable, then one-way, then no more news
    b = watched.status()["peers"][0]
    assert (b["state"], b["round"]) == ("one-way", 2)
    assert "we do not reach it: connection refused" in b["about"]
    assert sample(watched, 'lightyear_peer_reachable{peer="site-b"}') == 1
    watched.reached(B, 3, "training")
    assert watched.status()["peers"][0]["state"] == "reachable"
    watched.unreachable(C, "connection refused")
    assert watched.status()["peers"][1]["state"] == "unreachable"


def test_a_peer_that_stopped_is_not_said_to_reach_us() -> None:
    """It has called us until just before; two heartbeats and a call later that is no longer so."""
    watched = observer()
    watched.heartbeat_s = 1.0
    watched.called(B, 2, "training")
    watched.peers[B].called_at -= 6.5
    watched.unreachable(B, "no answer")
    assert watched.status()["peers"][0]["state"] == "one-way"
    watched.peers[B].called_at -= 1.0
    watched.unreachable(B, "no answer")
    assert watched.status()["peers"][0]["state"] == "unreachable"
    assert sample(watched, 'lightyear_peer_reachable{peer="site-b"}') == 0


def test_a_peer_whose_weights_fill_the_line_is_not_unreachable() -> None:
    watched = observer()
    watched.reached(B, 2, "training")
    watched.sending(B)
    watched.unreachable(B, "no answer")
    assert watched.status()["peers"][0]["state"] == "reachable"
    watched.peers[B].sent_at -= 2 * watched.heartbeat_s + 6
    watched.unreachable(B, "no answer")
    assert watched.status()["peers"][0]["state"] == "unreachable"


def test_bytes_are_counted_by_peer_and_direction() -> None:
    watched = observer()
    watched.transferred(B, "received", Transfer(1000, 600, 0.1))
    watched.transferred(C, "sent", Transfer(1000, 700, 0.1))
    assert (
        sample(watched, 'lightyear_transfer_bytes_total{direction="received",peer="site-b"}') == 600
    )
    assert watched.status()["bytes"] == {
        "raw": 1000, "wire": 600, "raw_sent": 1000, "wire_sent": 700,
    }  # fmt: skip


def test_after_a_restart_status_goes_on_from_the_journal() -> None:
    watched = observer()
    verdict = {
        "peer": "site-b",
        "accepted": False,
        "reason": "too_far",
        "score": 0.4,
        "digest": DIGEST,
    }
    rounds = [
        {
            "round": n,
            "model": DIGEST,
            "local": {},
            "merged": {"loss": 1.0},
            "verdicts": [verdict],
            "time": 1e9 + n,
        }
        for n in (5, 6, 7)
    ]
    watched.remember(rounds)
    assert sample(watched, 'lightyear_peer_consecutive_rejections{peer="site-b"}') == 3
    assert sample(watched, 'lightyear_peer_agreement{peer="site-b"}') == 0.4
    b = watched.status()["peers"][0]
    assert (b["verdict"], b["verdict_round"], b["agreement"]) == ("rejected", 7, 0.4)
    assert watched.status()["metrics"]["merged"] == {"loss": 1.0}
    assert sample(watched, 'lightyear_local_loss{stage="merged"}') == 1.0
    assert sample(watched, "lightyear_last_round_completed_timestamp_seconds") == 1e9 + 7
    assert sample(watched, "lightyear_peers_accepted") == 0


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as answer:
        return answer.code, answer.read().decode()


def test_health_and_metrics_over_http() -> None:
    problems: list[str] = []
    server = HttpServer(
        "127.0.0.1:0",
        [
            metrics_route(observer().metrics.registry),
            health_route("/livez", list),
            health_route("/readyz", lambda: problems),
        ],
    )
    try:
        assert get(server.port, "/livez")[0] == 200
        assert get(server.port, "/readyz")[0] == 200
        problems.append("the worker is not running")
        status, body = get(server.port, "/readyz")
        assert (status, json.loads(body)["problems"]) == (503, problems)
        assert "lightyear_round " in get(server.port, "/metrics")[1]
        assert get(server.port, "/../etc/passwd")[0] == 404
    finally:
        server.close()


def test_http_stays_on_loopback_and_names_a_port_in_use() -> None:
    def serve(listen: str) -> HttpServer:
        return HttpServer(listen, [])

    with pytest.raises(ConfigError, match="other machines can reach"):
        serve("0.0.0.0:0")
    server = serve("127.0.0.1:0")
    try:
        with pytest.raises(ConfigError, match="cannot listen on"):
            serve(f"127.0.0.1:{server.port}")
    finally:
        server.close()


@pytest.mark.parametrize("depth", [0, 12])
def test_the_admin_socket_answers_its_owner(tmp_path: Path, depth: int) -> None:
    """Also where the state directory's path is longer than a socket's address may be."""
    folder = tmp_path.joinpath(*["a-long-directory-name"] * depth)
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.raises(NotRunning):
        ask(folder, "status")

    async def run() -> Any:
        server = AdminServer(folder, {"status": lambda request: {"asked": request["ask"]}})
        await server.start()
        mode = (folder / SOCKET_NAME).stat().st_mode
        assert (stat.S_ISSOCK(mode), mode & 0o777) == (True, 0o600)
        try:
            with pytest.raises(NotRunning, match="did not understand"):
                await asyncio.to_thread(ask, folder, "no-such-question")
            return await asyncio.to_thread(ask, folder, "status")
        finally:
            await server.stop()

    assert asyncio.run(run()) == {"asked": "status"}
    with pytest.raises(NotRunning):
        ask(folder, "status")


def test_log_lines_cannot_be_forged(capsys: pytest.CaptureFixture[str]) -> None:
    logger = log.set_up("info")
    logger.info("a peer said %s", "hello\n12:00:00 INFO all is well\x1b[2J")
    [line] = capsys.readouterr().err.splitlines()
    assert "\\n12:00:00" in line
    assert "\x1b" not in line


def test_a_removed_peer_is_shown_as_such_until_it_is_back() -> None:
    stream = io.StringIO()
    watched = observer(stream)
    watched.reached(C, 3, "training")
    watched.reconfigured("site-c is removed", 1234.0, [B])
    watched.unreachable(C, "the line was cut")
    assert {peer["name"]: peer["state"] for peer in watched.status()["peers"]} == {
        B: "unknown",
        C: "removed",
    }
    assert sample(watched, "lightyear_peers_configured") == 1
    assert sample(watched, "lightyear_certificate_expiry_timestamp_seconds") == 1234
    assert "settings changed: site-c is removed" in stream.getvalue()
    watched.reconfigured("site-c is back", 1234.0, [B, C])
    watched.reached(C, 4, "training")
    assert watched.peers[C].state == "reachable"
