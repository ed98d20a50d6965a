"""The observer, health over HTTP, the admin socket, the log."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import socket
import stat
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from lightyear_node.errors import ConfigError
from lightyear_node.observe import log
from lightyear_node.observe.admin_socket import (
    CONNECTIONS_MAX,
    SOCKET_NAME,
    AdminServer,
    NotRunning,
    ask,
)
from lightyear_node.observe.http.server import HttpServer, health_route, metrics_route
from lightyear_node.observe.metrics import Metrics
from lightyear_node.observe.observer import Observer
from lightyear_node.protocol.parameters import Phase
from lightyear_node.types import (
    Attempt,
    Digest,
    Harm,
    PairedScores,
    PeerName,
    Reason,
    Round,
    Served,
    Transfer,
    Verdict,
    Worth,
)

B, C = PeerName("site-b"), PeerName("site-c")
DIGEST = Digest("0" * 64)


def observer(stream: io.StringIO | None = None) -> Observer:
    logger = logging.Logger("test")
    if stream is not None:
        logger.addHandler(logging.StreamHandler(stream))
    metrics = Metrics([B, C], [*Phase, "starting"], "1.2.3", 20)
    return Observer(metrics, logger, [B, C], 0.6)


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
    # A missing peer is not rejected, and its last score stays visible.
    assert (c["verdict"], c["reason"], c["agreement"]) == ("missing", "unreachable", 0.72)
    assert c["rejected_in_a_row"] == 0


def test_peers_dropped_from_a_merge_are_logged_counted_and_shown() -> None:
    stream = io.StringIO()
    watched = observer(stream)
    for peer in (B, C):
        assert sample(watched, f'lightyear_merge_dropped_total{{peer="{peer}"}}') == 0
    assert sample(watched, "lightyear_aggregate_reverts_total") == 0
    tried = (Attempt((), 0.9), Attempt((C,), 0.42))
    watched.committed(Round(3), "m", {}, Harm(0.5, 0.4, tried, (C,), kept_local=False))
    assert "left site-c out of the merge: with all updates our validation loss" in stream.getvalue()
    assert "from 0.4 to 0.9, above the limit of 0.5" in stream.getvalue()
    shown = watched.status()["harm"]
    assert (shown["round"], shown["dropped"], shown["kept_local"]) == (3, (C,), False)
    alone = Harm(0.5, 0.4, tried[:1], (C, B), kept_local=True)
    watched.committed(Round(4), "m", {}, alone)
    assert "round 4: kept our own model" in stream.getvalue()
    assert sample(watched, 'lightyear_merge_dropped_total{peer="site-b"}') == 1
    assert sample(watched, 'lightyear_merge_dropped_total{peer="site-c"}') == 2
    assert sample(watched, "lightyear_aggregate_reverts_total") == 1


def test_the_worth_of_the_federation_is_logged_measured_and_shown() -> None:
    stream = io.StringIO()
    watched = observer(stream)
    watched.compared(Round(2), None)
    assert watched.status()["worth"] is None
    assert "alone" not in stream.getvalue()
    better = PairedScores(50, 0.1, 0.09, 0.8)
    watched.compared(Round(3), Worth("decisions", (better,), Served.FEDERATED, {"loss": 2.0}))
    assert "round 3: federated against alone +10 ± 4.2 points" in stream.getvalue()
    assert sample(watched, 'lightyear_federation_gain{value="mean"}') == 0.1
    assert sample(watched, "lightyear_serving_federated") == 1
    assert sample(watched, 'lightyear_local_loss{stage="alone"}') == 2.0
    worse = PairedScores(50, -0.2, 0.09, 0.5)
    watched.compared(Round(4), Worth("decisions", (worse,), Served.ALONE))
    assert "round 4: federated against alone -20 ± 4.2 points, serving the one alone" in (
        stream.getvalue()
    )
    assert sample(watched, "lightyear_serving_federated") == 0
    shown = watched.status()["worth"]
    assert (shown["round"], shown["gain"], shown["served"]) == (4, -0.2, "alone")
    restarted = observer()
    entry = {"round": 4, "model": "m", "local": {}, "merged": {}, "time": 1.0, "verdicts": []}
    restarted.restore([{**entry, "worth": shown}])
    assert restarted.status()["worth"]["gain"] == -0.2


def test_a_merge_without_dropped_peers_is_not_logged_as_harm() -> None:
    stream = io.StringIO()
    watched = observer(stream)
    watched.committed(Round(3), "m", {}, Harm(0.5, 0.4, (Attempt((), 0.3),), (), kept_local=False))
    assert "harm" not in stream.getvalue()
    assert watched.status()["harm"]["tried"] == (
        {"without": (), "loss": 0.3, "gain": None, "error": None},
    )
    watched.committed(Round(4), "m", {})
    assert watched.status()["harm"] is None


def test_a_rejection_streak_is_counted_and_ends() -> None:
    watched = observer()
    bad = Verdict(C, False, Reason.TOO_FAR, score=0.5, digest=DIGEST)
    for number in range(3):
        watched.decided(Round(number), "all", [bad])
    assert sample(watched, 'lightyear_peer_consecutive_rejections{peer="site-c"}') == 3
    watched.decided(Round(3), "all", [Verdict(C, True, Reason.OK, score=0.9, digest=DIGEST)])
    assert sample(watched, 'lightyear_peer_consecutive_rejections{peer="site-c"}') == 0


def test_the_status_has_the_details_of_the_last_verdict() -> None:
    watched = observer()
    details = {"tensor": "head.weight"}
    bad = Verdict(C, False, Reason.TOO_FAR, score=0.5, digest=DIGEST, details=details)
    good = Verdict(C, True, Reason.OK, score=0.9, digest=DIGEST)
    for number, (verdict, expected) in enumerate([(bad, details), (good, {})]):
        watched.decided(Round(number), "all", [verdict])
        [shown] = [peer for peer in watched.peers.to_plain() if peer["name"] == C]
        assert shown["details"] == expected


def test_a_steady_state_logs_nothing() -> None:
    stream = io.StringIO()
    watched = observer(stream)
    for left in range(30, 0, -1):
        watched.set_phase(
            Round(2), "collecting", f"round 2: waiting for site-b (closing in {left} s)"
        )
        watched.peers.reached(B, 2, "training")
        watched.peers.unreachable(C, "connection refused")
    assert len(stream.getvalue().splitlines()) == 3


def test_a_one_way_connection_is_logged_once() -> None:
    """The peer calls us at every heartbeat, and all our calls fail."""
    stream = io.StringIO()
    watched = observer(stream)
    for _ in range(10):
        watched.peers.called(B, 2, "training")
        watched.peers.unreachable(B, "connection refused")
    assert len(stream.getvalue().splitlines()) == 2  # reachable, then one-way
    b = watched.status()["peers"][0]
    assert (b["state"], b["round"]) == ("one-way", 2)
    assert "we do not reach it: connection refused" in b["about"]
    assert sample(watched, 'lightyear_peer_reachable{peer="site-b"}') == 1
    watched.peers.reached(B, 3, "training")
    assert watched.status()["peers"][0]["state"] == "reachable"
    watched.peers.unreachable(C, "connection refused")
    assert watched.status()["peers"][1]["state"] == "unreachable"


def test_a_stopped_peer_is_unreachable_not_one_way() -> None:
    """Its last call counts for two heartbeats and the duration of a call."""
    watched = observer()
    watched.peers.heartbeat_s = 1.0
    watched.peers.called(B, 2, "training")
    watched.peers[B].called_at -= 6.5
    watched.peers.unreachable(B, "no answer")
    assert watched.status()["peers"][0]["state"] == "one-way"
    watched.peers[B].called_at -= 1.0
    watched.peers.unreachable(B, "no answer")
    assert watched.status()["peers"][0]["state"] == "unreachable"
    assert sample(watched, 'lightyear_peer_reachable{peer="site-b"}') == 0


def test_a_peer_that_is_sending_weights_is_not_unreachable() -> None:
    watched = observer()
    watched.peers.reached(B, 2, "training")
    watched.peers.sending(B)
    watched.peers.unreachable(B, "no answer")
    assert watched.status()["peers"][0]["state"] == "reachable"
    watched.peers[B].sent_at -= 2 * watched.peers.heartbeat_s + 6
    watched.peers.unreachable(B, "no answer")
    assert watched.status()["peers"][0]["state"] == "unreachable"


def test_bytes_are_counted_by_peer_and_direction() -> None:
    watched = observer()
    watched.peers.transferred(B, "received", Transfer(1000, 600, 0.1))
    watched.peers.transferred(C, "sent", Transfer(1000, 700, 0.1))
    assert (
        sample(watched, 'lightyear_transfer_bytes_total{direction="received",peer="site-b"}') == 600
    )
    assert watched.status()["bytes"] == {
        "raw": 1000, "wire": 600, "raw_sent": 1000, "wire_sent": 700,
    }  # fmt: skip


def test_after_a_restart_status_is_restored_from_the_journal() -> None:
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
    watched.restore(rounds)
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


def test_http_listens_on_loopback_only_and_reports_a_port_in_use() -> None:
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
    """Also if the path is longer than a socket address may be."""
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


def test_invalid_requests_on_the_admin_socket_get_no_answer(tmp_path: Path) -> None:
    """Idle connections do not block later ones; only the node's user, or root, can connect."""
    nested = b'{"ask":' + b"[" * 60_000 + b"\n"
    failed: list[dict[str, Any]] = []

    def reply_to(line: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(tmp_path / SOCKET_NAME))
            caller.sendall(line)
            return caller.recv(100)

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
        server = AdminServer(tmp_path, {"status": lambda request: {"asked": request["ask"]}})
        await server.start()
        try:
            for line in (nested, b"[" * 60_000 + b"\n", b"[]\n", b"\xff\n", b'{"ask": []}\n'):
                assert await asyncio.to_thread(reply_to, line) == b""
            assert await asyncio.to_thread(ask, tmp_path, "status") == {"asked": "status"}
            with contextlib.ExitStack() as clients:
                for _ in range(CONNECTIONS_MAX):
                    caller = clients.enter_context(socket.socket(socket.AF_UNIX))
                    await asyncio.to_thread(caller.connect, str(tmp_path / SOCKET_NAME))
                assert await asyncio.to_thread(reply_to, b"") == b""
            assert await asyncio.to_thread(reply_to, b'{"ask": "status"}\n')
        finally:
            await server.stop()

    asyncio.run(run())
    assert failed == []


def test_log_lines_cannot_be_forged(capsys: pytest.CaptureFixture[str]) -> None:
    logger = log.set_up("info")
    logger.info("received %s", "hello\n12:00:00 INFO all is well\x1b[2J")
    [line] = capsys.readouterr().err.splitlines()
    assert "\\n12:00:00" in line
    assert "\x1b" not in line


def test_a_removed_peer_is_shown_as_removed_until_it_is_added_again() -> None:
    stream = io.StringIO()
    watched = observer(stream)
    watched.peers.reached(C, 3, "training")
    watched.reconfigured("site-c is removed", 1234.0, [B])
    watched.peers.unreachable(C, "connection lost")
    assert {peer["name"]: peer["state"] for peer in watched.status()["peers"]} == {
        B: "unknown",
        C: "removed",
    }
    assert sample(watched, "lightyear_peers_configured") == 1
    assert sample(watched, "lightyear_certificate_expiry_timestamp_seconds") == 1234
    assert "settings changed: site-c is removed" in stream.getvalue()
    watched.reconfigured("site-c is back", 1234.0, [B, C])
    watched.peers.reached(C, 4, "training")
    assert watched.peers[C].state == "reachable"
