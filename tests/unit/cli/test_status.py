"""`status`, `status --watch` and `health`: in a terminal, in a pipe, with and without colour."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.cli.status_polling import StatusSample, facts
from lightyear_node.observe.admin_socket import AdminServer
from tests.support.terminal import COMMAND, DEADLINE_S, Terminal, environment

COLOUR = r"\x1b\[[\d;]*\b(3[0-7]|9[0-7])m"
WATCH = ("status", "--watch", "--interval", "0.1")


def status(**changes: Any) -> dict[str, Any]:
    """A node's status in the middle of a round."""
    peer = {
        "name": "site-b",
        "state": "reachable",
        "about": "",
        "round": 3,
        "phase": "collecting",
        "verdict": "rejected",
        "reason": "agreement_below_tau",
        "agreement": 0.412,
        "verdict_round": 2,
        "rejected_in_a_row": 1,
        "left_out": 0,
        "differs": "",
        "opinion": "",
    }
    return {
        "name": "site-a",
        "federation": "ward",
        "round": 3,
        "rounds": 20,
        "phase": "training",
        "waiting": "round 3: training",
        "threshold": 0.6,
        "problems": [],
        "paused": False,
        "blocked": [],
        "quarantined": [],
        "work": {"job": "train", "done": 30, "total": 120, "rate": 1.5, "left_s": 60.0},
        "transfers": [
            {"peer": "site-b", "done": 8 << 20, "total": 32 << 20, "rate": 4.0 * (1 << 20),
             "left_s": 6.0}
        ],
        "harm": None,
        "bytes": {"raw": 4 << 20, "wire": 3 << 20, "raw_sent": 0, "wire_sent": 0},
        "certificate_expires": "2028-11-15T00:00:00+00:00",
        "peers": [peer],
    } | changes  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "node.yaml").write_text("address: 127.0.0.1:7443\n")
    (tmp_path / "state").mkdir()
    return tmp_path


@contextmanager
def answering(home: Path, answer: dict[str, Any]) -> Iterator[None]:
    """Serve the admin socket of a node whose status is `answer`, which the test may change."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = AdminServer(home / "state", {"status": lambda _: answer, "health": lambda _: []})
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(DEADLINE_S)
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(DEADLINE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_the_live_view_shows_jobs_transfers_and_verdicts_until_q(home: Path) -> None:
    with answering(home, status()), Terminal(*WATCH, cwd=home) as terminal:
        terminal.wait_for(
            "site-a in ward: 3 of 20 rounds done, training",
            *("training", " 25 %", "30 of 120, 1.5/s, about 60 s left"),
            *("from site-b", "8.0 MiB of 32.0 MiB, 4.0 MiB/s, about 6 s left"),
            *("✗ rejected", "agreement_below_tau", "0.412 (τ 0.60)"),
        )
        assert re.search(COLOUR, terminal.raw)
        terminal.type("xq")
        assert terminal.exit_code() == 0
        assert terminal.settings() == terminal.before


def test_the_live_view_survives_a_restart_of_the_node(home: Path) -> None:
    with Terminal(*WATCH, cwd=home) as terminal:
        at = terminal.wait_for("gone since", "no node is running", "waiting for it")
        with answering(home, status()):
            at = terminal.wait_for("3 of 20 rounds done", since=at)
        at = terminal.wait_for(
            "gone since", "last seen: site-a in ward: 3 of 20 rounds done", since=at
        )
        with answering(home, status(round=7)):
            terminal.wait_for("7 of 20 rounds done", since=at)
            terminal.process.send_signal(signal.SIGINT)
            assert terminal.exit_code() == 130
        assert terminal.settings() == terminal.before
        assert "Traceback" not in terminal.text


def test_without_colour_the_marks_and_texts_remain(home: Path) -> None:
    with (
        answering(home, status(problems=["the disk is full"])),
        Terminal(*WATCH, cwd=home, NO_COLOR="1") as terminal,
    ):
        terminal.wait_for("✗ rejected", "NOT READY: the disk is full", "MiB/s")
        assert not re.search(COLOUR, terminal.raw)


def test_a_dumb_terminal_gets_plain_lines(home: Path) -> None:
    with answering(home, status()), Terminal(*WATCH, cwd=home, TERM="dumb") as terminal:
        terminal.wait_for("3 of 20 rounds done, training", "site-b: reachable; rejected in round 2")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.exit_code() == 130
        assert "\x1b" not in terminal.raw


def watching(home: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *WATCH, *more], cwd=home, env=environment(), stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("format", ["json", "jsonl"])
def test_json_output_has_an_object_for_every_change(home: Path, format: str) -> None:
    answer = status()
    with watching(home, "--format", format) as process:
        assert process.stdout is not None
        try:
            lines = (json.loads(line) for line in process.stdout)
            first = next(lines)
            if format == "json":
                assert (first["schema_version"], first["status"]) == ("1", "ok")
                first, lines = first["data"], (line["data"] for line in lines)
            assert (first["running"], "gone_since" in first) == (False, True)
            with answering(home, answer):
                shown = next(lines)
                assert shown["running"]
                assert shown | answer == shown
                answer["work"] = {**answer["work"], "done": 31}  # not printed
                answer["phase"] = "collecting"
                assert next(lines)["phase"] == "collecting"
            assert not next(lines)["running"]
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) == 130
        finally:
            process.kill()


def test_a_pipe_gets_a_line_for_every_change(home: Path) -> None:
    answer = status()
    with answering(home, answer), watching(home) as process:
        assert process.stdout is not None
        try:
            assert "site-a in ward: 3 of 20 rounds done, training" in next(process.stdout)
            assert "site-b: reachable; rejected in round 2" in next(process.stdout)
            answer["waiting"] = "round 3: waiting for site-b (closing in 9 s)"
            assert "waiting for site-b (closing in … s)" in next(process.stdout)
            answer["waiting"] = "round 3: waiting for site-b (closing in 8 s)"
            answer["blocked"] = ["site-b"]
            assert "blocked: site-b" in next(process.stdout)
        finally:
            process.kill()


def test_a_countdown_is_not_a_change() -> None:
    one = facts(
        StatusSample(status(waiting="round 3: waiting for site-b (1 here; closing in 12 s)"))
    )
    other = facts(
        StatusSample(status(waiting="round 3: waiting for site-b (1 here; closing in 3 s)"))
    )
    assert one == other
    assert facts(StatusSample(status(waiting="round 3: judging 2 updates"))) != one


def test_status_shows_the_progress_of_jobs_and_transfers(home: Path) -> None:
    with answering(home, status()):
        shown = subprocess.run(
            [*COMMAND, "status"], cwd=home, env=environment(), capture_output=True, text=True
        )
    assert "training: 25 %, 30 of 120, 1.5/s, about 60 s left" in shown.stdout
    assert "from site-b: 25 %, 8.0 MiB of 32.0 MiB, 4.0 MiB/s, about 6 s left" in shown.stdout
    assert "\x1b" not in shown.stdout


def run(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words],
        cwd=home,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_health_lists_degraded_peers(home: Path) -> None:
    peer = status()["peers"][0]
    refuses = "refuses us: another node is running with our keys"
    down = "nothing listens at 10.0.0.3:7443: is the node running there?"
    peers = [
        {**peer, "state": "refused", "about": refuses},
        {**peer, "name": "site-c", "state": "unreachable", "about": down},
        {**peer, "name": "site-d"},
        {**peer, "name": "site-e"},
    ]
    with answering(home, status(peers=peers, quarantined=["site-e"])):
        ended = run(home, "health")
        assert ended.returncode == 0
        assert ended.stdout.splitlines() == [
            "ready, but degraded:",
            f"  site-b: {refuses}",
            f"  site-c: unreachable: {down}",
            "  site-e: quarantined: it signed two updates of one round",
        ]
        data = json.loads(run(home, "health", "--format", "json").stdout)["data"]
        assert (data["ready"], data["problems"]) == (True, [])
        assert [(one["peer"], one["state"]) for one in data["degraded"]] == [
            ("site-b", "refused"),
            ("site-c", "unreachable"),
            ("site-e", "quarantined"),
        ]
    with answering(home, status()):
        assert run(home, "health").stdout == "ready\n"
    with answering(home, status(peers=peers, problems=["the disk is full"])):
        ended = run(home, "health")
        assert ended.returncode == 3
        assert ended.stderr == "the disk is full\n"
        assert "site-c: unreachable" in ended.stdout
