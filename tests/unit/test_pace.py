"""How far, how fast, how long yet."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lightyear_node.observe.pace import RECENT, Pace, UnderWay
from lightyear_node.observe.words import drawable, duration, progress_words, rate_text
from lightyear_node.records import PeerName

B = PeerName("site-b")


def test_a_rate_and_what_is_left() -> None:
    pace = Pace(0, 100, now=10.0)
    assert pace.to_plain(10.0) == {"done": 0, "total": 100, "rate": None, "left_s": None}
    pace.advance(20, 100, now=14.0)
    assert pace.to_plain(14.0) == {"done": 20, "total": 100, "rate": 5.0, "left_s": 16.0}


def test_a_rate_sinks_while_nothing_comes() -> None:
    pace = Pace(0, 100, now=0.0)
    pace.advance(20, 100, now=4.0)
    assert pace.rate(40.0) == pytest.approx(0.5)
    assert pace.left_s(40.0) == pytest.approx(160)


def test_what_was_long_ago_does_not_count() -> None:
    pace = Pace(0, 10_000, now=0.0)
    for second in range(1, RECENT + 1):
        pace.advance(second, 10_000, now=float(second))
    for second in range(RECENT + 1, 2 * RECENT + 1):
        pace.advance(RECENT + 100 * (second - RECENT), 10_000, now=float(second))
    assert pace.rate(2.0 * RECENT) == pytest.approx(100)


def test_a_resumed_transfer_is_as_fast_as_what_came_since() -> None:
    pace = Pace(900, 1000, now=0.0)
    pace.advance(950, 1000, now=10.0)
    assert pace.rate(10.0) == pytest.approx(5)


def test_jobs_and_transfers_begin_and_end() -> None:
    under_way = UnderWay()
    assert under_way.to_plain() == {"work": None, "transfers": []}
    under_way.worked("train", 5, 10)
    under_way.arriving(B, 1, 3)
    under_way.arriving(B, 2, 3)
    plain = under_way.to_plain()
    assert (plain["work"]["job"], plain["work"]["done"]) == ("train", 5)
    [transfer] = plain["transfers"]
    assert (transfer["peer"], transfer["done"], transfer["total"]) == (B, 2, 3)
    assert transfer["rate"] > 0
    # The same job of the next round begins anew, and so does a transfer from its start.
    under_way.worked("train", 1, 10)
    under_way.arriving(B, 1, 3)
    plain = under_way.to_plain()
    assert plain["work"]["rate"] is None
    assert plain["transfers"][0]["rate"] is None
    under_way.rest()
    under_way.arrived(B)
    under_way.arrived(B)
    assert under_way.to_plain() == {"work": None, "transfers": []}


def test_words() -> None:
    assert [duration(s) for s in (0, 99, 600, 7260)] == ["0 s", "99 s", "10 min", "2 h 01 min"]
    assert [rate_text(r) for r in (25, 2.5, 0.5, 0.001)] == ["25/s", "2.5/s", "30/min", "3.6/h"]
    pace = {"done": 1 << 20, "total": 4 << 20, "rate": float(1 << 19), "left_s": 6.0}
    words = "1.0 MiB of 4.0 MiB, 0.5 MiB/s, about 6 s left"
    assert progress_words(pace, weights=True) == words
    slow = {"done": 1, "total": 4, "rate": None, "left_s": None}
    assert progress_words(slow) == "1 of 4"


def test_a_dumb_terminal_is_not_drawn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {}
    for kind in ("xterm-256color", "dumb"):
        monkeypatch.setenv("TERM", kind)
        drawn[kind] = drawable(Console(file=io.StringIO(), force_terminal=True))
    assert drawn == {"xterm-256color": True, "dumb": False}
    assert not drawable(Console(file=io.StringIO()))
