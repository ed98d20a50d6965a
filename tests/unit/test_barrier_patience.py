"""How long a round waits for those who are missing, and when it goes on without them."""

from __future__ import annotations

from lightyear_node.barrier import Announced, Cause, Judge
from lightyear_node.records import Reason
from tests.unit.barrier_bench import TICK_S, B, Bench, C, D, judge_in, only, update


def slow_site(deadline_s: float) -> Bench:
    """In round 3 with B and C here, and D known but late."""
    bench = Bench(deadline_s=deadline_s).in_round(3)
    bench.tell(Announced(update(D, 2)))
    bench.delivered(update(B, 3), update(C, 3))
    return bench


def test_without_a_deadline_the_grace_is_all_that_a_slow_site_gets() -> None:
    bench = slow_site(deadline_s=0)
    assert judge_in(bench.wait(30, working=[D])).why == "grace over with 2 of 3; missing d"


def test_who_is_still_training_is_waited_for_until_the_deadline() -> None:
    bench = slow_site(deadline_s=300)
    assert only(Judge, bench.wait(299, working=[D])) == []
    assert "still making progress; closing in 1 s at the latest" in bench.barrier.waiting_for(
        bench.now
    )
    judge = judge_in(bench.wait(1, working=[D]))
    assert (judge.cause, judge.missing) == (Cause.GRACE, ((D, Reason.TIMEOUT),))
    assert judge.why == "deadline over with 2 of 3; missing d"


def test_who_stops_training_without_delivering_is_waited_for_no_longer() -> None:
    bench = slow_site(deadline_s=300)
    assert only(Judge, bench.wait(100, working=[D])) == []
    assert judge_in(bench.wait(TICK_S, alive=[D])).cause is Cause.GRACE


def test_patience_is_tried_once() -> None:
    """A site that pretends to be at work costs the others one deadline, not one a round."""
    bench = slow_site(deadline_s=300)
    bench.finished_round(judge_in(bench.wait(300, working=[D])))
    bench.sealed()
    bench.delivered(update(B, 4), update(C, 4))
    assert judge_in(bench.wait(30, working=[D])).why == "grace over with 2 of 3; missing d"


def test_patience_returns_when_the_site_delivers() -> None:
    bench = slow_site(deadline_s=300)
    bench.finished_round(judge_in(bench.wait(300, working=[D])))
    bench.sealed()
    bench.finished_round(judge_in(bench.delivered(*(update(peer, 4) for peer in (B, C, D)))))
    bench.sealed()
    bench.delivered(update(B, 5), update(C, 5))
    assert only(Judge, bench.wait(299, working=[D])) == []
