"""Log floods: the number of lines that peers and strangers can cause is limited."""

from __future__ import annotations

import io
import itertools
import logging
from collections.abc import Iterator

import pytest

from lightyear_node.node.gossip import differences_text
from lightyear_node.observe.log import NAME, RecentLines
from lightyear_node.observe.log_limits import CHARS_MAX, HOUR_S, LINES_MAX, LogLimits
from lightyear_node.observe.observer import PHASE_LINES_MAX, Observer
from lightyear_node.observe.peer_status import ACCUSATIONS_KEPT
from lightyear_node.types import Opinion, Reason, Round
from tests.support.observer_events import DIGEST, PHASES, B, C, Metrics

FLOOD = 1000


class LimitedLog:
    """An observer with a collected and limited log, as in a node, and a simulated clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stream = io.StringIO()
        self.recent = RecentLines()
        self.logger = logging.getLogger(f"{NAME}.limited")
        self.logger.propagate = False
        self.logger.setLevel(logging.INFO)
        metrics = Metrics([B, C], PHASES, "1.2.3", 20)
        self.observer = Observer(
            metrics, self.logger, [B, C], 0.6, log_limits=LogLimits(now=lambda: self.now)
        )
        self.logger.handlers[:] = [logging.StreamHandler(self.stream), self.recent]
        for handler in self.logger.handlers:
            handler.addFilter(self.observer.log_limits)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()

    def suppressed(self) -> float:
        found = self.observer.metrics.registry.get_sample_value(
            "lightyear_log_lines_suppressed_total"
        )
        assert found is not None
        return found


@pytest.fixture
def limited() -> Iterator[LimitedLog]:
    log = LimitedLog()
    yield log
    log.logger.handlers[:] = []


def test_lines_of_a_peer_with_ever_new_texts_are_limited(
    limited: LimitedLog,
) -> None:
    """Every text is new, and the peer is reachable in between, so deduplication does not help."""
    for count in range(FLOOD):
        limited.observer.peers.refused(B, Reason.MALFORMED, f"complaint {count}")
        limited.observer.peers.refused(B, Reason.FEDERATION, f"another complaint {count}")
        limited.observer.peers.reached(B, 1, "training")
        limited.observer.peers.differs(B, [f"key {count} is only in its copy"])
        limited.observer.peers.transfer_failed(B, Reason.CHECKSUM, f"chunk {count}")
        limited.observer.peers.rewritten(B, f"another journal, up to record {count}")
        limited.observer.journal_broken(f"it holds record {count} of ours", B)
        limited.observer.peers.opinion(B, Opinion(Round(count), DIGEST, False, "too_far"))
        limited.observer.peers.accused(B, count)
    kinds = 9
    assert len(limited.lines) == kinds * LINES_MAX
    assert limited.suppressed() == kinds * (FLOOD - LINES_MAX), "counted once, for two handlers"
    assert [line["message"] for line in limited.recent.lines()] == limited.lines


def test_a_flood_of_one_kind_does_not_suppress_other_kinds(limited: LimitedLog) -> None:
    for count in range(FLOOD):
        limited.observer.peers.refused(B, Reason.MALFORMED, f"complaint {count}")
    before = len(limited.lines)
    others = [reason for reason in Reason if reason is not Reason.MALFORMED]
    for reason in others:
        limited.observer.peers.refused(B, reason, f"for {reason}")
    limited.observer.peers.quarantined(B, 3)
    limited.observer.peers.rewritten(B, "its journal is another")
    limited.observer.peers.accused(B, 3)
    limited.observer.peers.refused(C, Reason.MALFORMED, "another peer has a budget of its own")
    assert len(limited.lines) - before == len(others) + 4


def test_suppressed_lines_are_reported_once_an_hour(limited: LimitedLog) -> None:
    for count in range(FLOOD):
        limited.observer.peers.refused(B, Reason.MALFORMED, f"complaint {count}")
    limited.now = HOUR_S - 1
    limited.observer.report_suppressed()
    assert len(limited.lines) == LINES_MAX
    limited.now = HOUR_S
    limited.observer.report_suppressed()
    limited.observer.report_suppressed()
    *_, last = limited.lines
    assert last == f"{FLOOD - LINES_MAX} further messages about site-b suppressed in the last hour"
    assert len(limited.lines) == LINES_MAX + 1
    limited.observer.peers.refused(B, Reason.MALFORMED, "an hour later")
    assert limited.lines[-1].endswith("an hour later")


def test_strangers_share_one_budget_for_each_kind(limited: LimitedLog) -> None:
    handler, limits = limited.logger.handlers[0], limited.observer.log_limits
    library = logging.Logger("grpc._cython.cygrpc")
    library.addHandler(handler)
    other = logging.Logger("asyncio")
    other.addHandler(handler)
    http = {"event": "http"}
    for count in range(FLOOD):
        library.warning("stranger %d failed", count)
        limited.logger.error("/page/%d could not be answered", count, extra=http)
    other.error("something was never awaited")
    assert len(limited.lines) == 2 * LINES_MAX + 1
    limited.now = HOUR_S
    assert limits.ended_hours() == [("strangers", 2 * (FLOOD - LINES_MAX))]


def test_our_own_lines_are_not_limited(limited: LimitedLog) -> None:
    for count in range(FLOOD):
        limited.observer.trained(Round(count), {"loss": 1.0})
    assert len(limited.lines) == FLOOD


def test_long_texts_of_a_peer_are_cut(limited: LimitedLog) -> None:
    limited.observer.peers.refused(B, Reason.MALFORMED, "x" * 64_000)
    limited.observer.peers.differs(
        B, [differences_text({}, {f"{'k' * 120}{n}": "" for n in range(256)})]
    )
    assert [len(line) for line in limited.lines] == [CHARS_MAX + 1] * 2
    assert len(limited.observer.peers[B].differs) < 2000
    ours = {"rounds": "1", **{f"b{n}": "" for n in range(20)}}
    assert "`rounds` is not the same, " in differences_text(ours, {"rounds": "2"})
    assert differences_text(ours, {"rounds": "2"}).endswith(", and 13 more")


def test_phase_lines_that_peers_can_change_are_limited(
    limited: LimitedLog,
) -> None:
    for waiting in itertools.islice(itertools.cycle(["waiting for b", "waiting for c"]), FLOOD):
        limited.observer.set_phase(Round(1), "collecting", waiting)
    assert len(limited.lines) == PHASE_LINES_MAX + 2 * len(limited.observer.peers)
    limited.observer.set_phase(Round(1), "judging", "round 1: judging")
    assert limited.lines[-1] == "round 1: judging"


def test_the_number_of_remembered_accusations_is_limited(limited: LimitedLog) -> None:
    """A thief of our key can sign two updates of any round."""
    for round in range(FLOOD):
        limited.observer.peers.accused(B, round)
        limited.observer.peers.accused(B, round)
    count = limited.observer.metrics.registry.get_sample_value
    assert count("lightyear_accusations_total") == FLOOD
    for round in (FLOOD - ACCUSATIONS_KEPT, FLOOD - 1):  # still remembered
        limited.observer.peers.accused(B, round)
    assert count("lightyear_accusations_total") == FLOOD
    limited.observer.peers.accused(B, FLOOD - ACCUSATIONS_KEPT - 1)
    assert count("lightyear_accusations_total") == FLOOD + 1


def test_a_record_that_cannot_be_formatted_passes_the_filter(limited: LimitedLog) -> None:
    """The filter runs in the caller of the logger; errors are left to the handler."""
    record = logging.LogRecord("grpc", logging.WARNING, "", 0, "%d of %d", ("one",), None)
    assert limited.observer.log_limits.filter(record)
