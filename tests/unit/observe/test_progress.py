"""Progress, rate and remaining time."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lightyear_node.observe.progress import (
    RECENT,
    CurrentJobs,
    JobProgress,
    can_redraw,
    duration,
    progress_text,
    rate_text,
)
from lightyear_node.types import PeerName

B = PeerName("site-b")


def test_rate_and_remaining_time() -> None:
    progress = JobProgress(0, 100, now=10.0)
    assert progress.to_plain(10.0) == {"done": 0, "total": 100, "rate": None, "left_s": None}
    progress.advance(20, 100, now=14.0)
    assert progress.to_plain(14.0) == {"done": 20, "total": 100, "rate": 5.0, "left_s": 16.0}


def test_the_rate_falls_while_no_report_arrives() -> None:
    progress = JobProgress(0, 100, now=0.0)
    progress.advance(20, 100, now=4.0)
    assert progress.rate(40.0) == pytest.approx(0.5)
    assert progress.left_s(40.0) == pytest.approx(160)


def test_old_reports_do_not_affect_the_rate() -> None:
    progress = JobProgress(0, 10_000, now=0.0)
    for second in range(1, RECENT + 1):
        progress.advance(second, 10_000, now=float(second))
    for second in range(RECENT + 1, 2 * RECENT + 1):
        progress.advance(RECENT + 100 * (second - RECENT), 10_000, now=float(second))
    assert progress.rate(2.0 * RECENT) == pytest.approx(100)


def test_the_rate_of_a_resumed_transfer_ignores_earlier_bytes() -> None:
    progress = JobProgress(900, 1000, now=0.0)
    progress.advance(950, 1000, now=10.0)
    assert progress.rate(10.0) == pytest.approx(5)


def test_jobs_and_transfers_begin_and_end() -> None:
    jobs = CurrentJobs()
    assert jobs.to_plain() == {"work": None, "transfers": []}
    jobs.worked("train", 5, 10)
    jobs.arriving(B, 1, 3)
    jobs.arriving(B, 2, 3)
    plain = jobs.to_plain()
    assert (plain["work"]["job"], plain["work"]["done"]) == ("train", 5)
    [transfer] = plain["transfers"]
    assert (transfer["peer"], transfer["done"], transfer["total"]) == (B, 2, 3)
    assert transfer["rate"] > 0
    # A job of the next round and a restarted transfer begin with a new rate.
    jobs.worked("train", 1, 10)
    jobs.arriving(B, 1, 3)
    plain = jobs.to_plain()
    assert plain["work"]["rate"] is None
    assert plain["transfers"][0]["rate"] is None
    jobs.end_job()
    jobs.arrived(B)
    jobs.arrived(B)
    assert jobs.to_plain() == {"work": None, "transfers": []}


def test_texts() -> None:
    assert [duration(s) for s in (0, 99, 600, 7260)] == ["0 s", "99 s", "10 min", "2 h 01 min"]
    assert [rate_text(r) for r in (25, 2.5, 0.5, 0.001)] == ["25/s", "2.5/s", "30/min", "3.6/h"]
    progress = {"done": 1 << 20, "total": 4 << 20, "rate": float(1 << 19), "left_s": 6.0}
    text = "1.0 MiB of 4.0 MiB, 0.5 MiB/s, about 6 s left"
    assert progress_text(progress, weights=True) == text
    slow = {"done": 1, "total": 4, "rate": None, "left_s": None}
    assert progress_text(slow) == "1 of 4"


def test_a_dumb_terminal_cannot_be_reredrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    redrawn = {}
    for kind in ("xterm-256color", "dumb"):
        monkeypatch.setenv("TERM", kind)
        redrawn[kind] = can_redraw(Console(file=io.StringIO(), force_terminal=True))
    assert redrawn == {"xterm-256color": True, "dumb": False}
    assert not can_redraw(Console(file=io.StringIO()))
