"""When the barrier closes a round, and what it decides then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightyear_node.protocol.events import (
    Alarm,
    Announce,
    Announced,
    Blocked,
    Commit,
    Decide,
    Fetch,
    Fetched,
    FetchFailed,
    Judge,
    Judged,
    Merge,
    Merged,
    Tick,
    Train,
)
from lightyear_node.protocol.parameters import Cause, Phase, Standing
from lightyear_node.protocol.state_machine import DEGRADED
from lightyear_node.types import Generation, Reason, Round, Verdict
from tests.support.barrier_bench import (
    MODEL,
    TICK_S,
    US,
    B,
    Bench,
    C,
    D,
    age,
    judge_in,
    knowing,
    memory,
    only,
    update,
)

# Closing.


def test_a_round_closes_when_all_have_delivered() -> None:
    bench = Bench().in_round(3)
    assert only(Judge, bench.delivered(update(C, 3), update(B, 3))) == []
    judge = judge_in(bench.delivered(update(D, 3)))
    assert judge == Judge(
        Round(3),
        (update(B, 3), update(C, 3), update(D, 3)),
        (),
        Cause.ALL,
        "all 3 peers delivered",
    )


def test_a_later_update_counts_for_an_earlier_round() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    judge = judge_in(bench.delivered(update(B, 3), update(D, 3), update(C, 10**9)))
    assert (judge.round, judge.cause) == (3, Cause.ALL)
    assert update(C, 10**9) in judge.updates


def test_silent_peers_are_not_waited_for() -> None:
    bench = Bench().in_round(3)
    bench.delivered(update(B, 3), update(C, 3))
    assert only(Judge, bench.wait(20)) == []
    judge = judge_in(bench.wait(0.5))
    assert (judge.cause, judge.missing) == (Cause.ALL, ((D, Reason.UNREACHABLE),))
    assert judge.why == "nobody to wait for with 2 of 3; d is silent"


def test_lagging_peers_are_not_waited_for() -> None:
    bench = Bench().in_round(10)
    bench.tell(Announced(update(D, 8)))
    assert only(Judge, bench.delivered(update(B, 10), update(C, 10))) == []
    bench = Bench().in_round(11)
    bench.tell(Announced(update(D, 8)))
    judge = judge_in(bench.delivered(update(B, 11), update(C, 11)))
    assert (judge.cause, judge.missing) == (Cause.ALL, ((D, Reason.STALE_ROUND),))


def test_a_round_closes_when_the_grace_is_over() -> None:
    bench = Bench().in_round(3)
    bench.wait(100, alive=[B, C, D])
    bench.delivered(update(B, 3), update(C, 3))
    assert only(Judge, bench.wait(29.5, alive=[D])) == []
    judge = judge_in(bench.wait(0.5, alive=[D]))
    assert (judge.cause, judge.missing) == (Cause.GRACE, ((D, Reason.TIMEOUT),))
    assert judge.why == "grace over with 2 of 3; missing d"


def test_the_grace_restarts_when_the_quorum_is_lost() -> None:
    bench = Bench().in_round(3)
    bench.delivered(update(B, 3), update(C, 3))
    bench.wait(20, alive=[D])
    bench.tell(Blocked(frozenset({C})), Blocked(frozenset()))
    assert only(Judge, bench.wait(29.5, alive=[D])) == []
    assert judge_in(bench.wait(0.5, alive=[D])).cause is Cause.GRACE


def test_every_round_has_its_own_grace() -> None:
    bench = Bench().in_round(3)
    bench.delivered(update(B, 3), update(C, 3))
    bench.wait(25, alive=[D])
    bench.finished_round(judge_in(bench.delivered(update(D, 3))))
    bench.delivered(update(B, 4), update(C, 4))
    bench.wait(10, alive=[B, C, D])
    assert only(Judge, bench.sealed() + bench.wait(29.5, alive=[D])) == []
    assert judge_in(bench.wait(0.5, alive=[D])).cause is Cause.GRACE


def test_a_failed_fetch_is_named_when_the_round_closes_without_it() -> None:
    bench = Bench().in_round(3)
    bench.delivered(update(B, 3), update(C, 3))
    bench.tell(Announced(update(D, 3)))
    bench.tell(FetchFailed(update(D, 3), Reason.TRUNCATED, retriable=True))
    assert judge_in(bench.wait(30, alive=[D])).missing == ((D, Reason.TRUNCATED),)


def test_an_old_failure_is_not_named() -> None:
    bench = Bench().in_round(3)
    bench.tell(Announced(update(D, 3)))
    bench.tell(FetchFailed(update(D, 3), Reason.TRUNCATED, retriable=True))
    bench.tell(*[Announced(update(peer, 3)) for peer in (B, C)])
    bench.wait(5, alive=[B, C, D])
    judge = judge_in(bench.tell(*[Fetched(update(peer, 3)) for peer in (B, C, D)]))
    bench.finished_round(judge)
    bench.sealed()
    bench.tell(Announced(update(D, 4)))
    bench.delivered(update(B, 4), update(C, 4))
    assert judge_in(bench.wait(30, alive=[D])).missing == ((D, Reason.TIMEOUT),)


def test_a_round_closes_when_it_is_overtaken() -> None:
    bench = Bench(faulty_max=1).in_round(5)
    bench.tell(Announced(update(B, 6)))
    assert bench.phase is Phase.COLLECTING
    bench.tell(Announced(update(C, 8)))
    # Running downloads are waited for, so that a slow site merges, too.
    assert bench.phase is Phase.COLLECTING
    bench.tell(Fetched(update(B, 6)))
    judge = judge_in(bench.tell(FetchFailed(update(C, 8), Reason.TIMEOUT, retriable=True)))
    assert (judge.cause, judge.updates) == (Cause.OVERTAKEN, (update(B, 6),))
    assert judge.missing == ((C, Reason.TIMEOUT), (D, Reason.TIMEOUT))
    assert judge.why == "overtaken: 2 peers are beyond round 5"
    assert Train(Round(6)) in bench.finished_round(judge)


def test_an_overtaken_round_waits_for_a_download_of_its_own_round() -> None:
    bench = Bench(faulty_max=1).in_round(5)
    bench.tell(Announced(update(B, 6)), Announced(update(C, 6)), Announced(update(D, 5)))
    for beyond in (update(B, 6), update(C, 6)):
        bench.tell(FetchFailed(beyond, Reason.TIMEOUT, retriable=True))
    assert bench.phase is Phase.COLLECTING
    assert judge_in(bench.tell(Fetched(update(D, 5)))).updates == (update(D, 5),)


def test_an_overtaken_round_does_not_wait_for_unusable_downloads() -> None:
    bench = Bench(faulty_max=1, remembers=memory(4))
    bench.start()
    bench.tell(*[Announced(each) for each in (update(B, 4), update(C, 5), update(D, 5))])
    bench.sealed()
    assert bench.barrier.round == 5
    # All three are being fetched: one is too old by now, and one peer is blocked.
    bench.tell(FetchFailed(update(C, 5), Reason.TIMEOUT, retriable=True))
    bench.tell(Blocked(frozenset({D})))
    bench.tell(Announced(update(B, 6)), Announced(update(C, 6)))
    judge = judge_in(bench.tell(FetchFailed(update(C, 6), Reason.TIMEOUT, retriable=True)))
    assert judge.why == "overtaken: 2 peers are beyond round 5"


def test_excluded_peers_do_not_count_as_beyond() -> None:
    bench = Bench().in_round(5)
    bench.tell(Blocked(frozenset({B})))
    bench.tell(Announced(update(B, 6)), Announced(update(C, 5)), Announced(update(D, 6)))
    bench.tell(FetchFailed(update(C, 5), Reason.TIMEOUT, retriable=True))
    judge = judge_in(bench.tell(FetchFailed(update(D, 6), Reason.TIMEOUT, retriable=True)))
    assert judge.why == "overtaken: 1 peer is beyond round 5"


def test_an_overtaken_round_waits_at_most_a_grace_for_a_slow_transfer() -> None:
    bench = Bench(faulty_max=1).in_round(5)
    bench.tell(Announced(update(B, 6)), Announced(update(C, 8)))
    assert only(Judge, bench.wait(29.5, alive=[B, C, D])) == []
    judge = judge_in(bench.wait(0.5, alive=[B, C, D]))
    assert (judge.cause, judge.updates) == (Cause.OVERTAKEN, ())


@pytest.mark.parametrize("heard", [False, True])
def test_a_starting_site_gets_one_grace(heard: bool) -> None:
    """Three sites start one after the other: the first round waits for all of them."""
    bench = Bench(peers=(B, C), min_peers=1)
    bench.start(answering=False)
    alive = [B, C] if heard else [B]
    bench.wait(5, alive)
    bench.sealed()
    bench.delivered(update(B, 0))
    assert only(Judge, bench.wait(29.5, alive)) == []
    judge = judge_in(bench.wait(0.5, alive))
    assert judge.cause is Cause.GRACE
    bench.finished_round(judge)
    # It has had its grace period: the next round does not wait for it.
    bench.sealed()
    judge = judge_in(bench.delivered(update(B, 1)))
    expected = (C, Reason.STALE_ROUND if heard else Reason.UNREACHABLE)
    assert (judge.cause, judge.missing) == (Cause.ALL, (expected,))
    bench.finished_round(judge)
    # After its first announcement it is waited for like any other peer.
    bench.tell(Announced(update(C, 0)))
    bench.sealed()
    assert only(Judge, bench.delivered(update(B, 2))) == []
    assert bench.barrier.standing(C, bench.now) is Standing.AWAITED


def test_a_site_that_starts_late_is_not_lost_in_the_first_round() -> None:
    bench = Bench(peers=(B, C), min_peers=1)
    bench.start(answering=False)
    bench.wait(5, alive=[B])
    bench.sealed()
    bench.delivered(update(B, 0))
    bench.wait(25, alive=[B])
    assert judge_in(bench.delivered(update(C, 0))).why == "all 2 peers delivered"


def test_no_round_closes_without_a_quorum_after_any_time() -> None:
    bench = Bench().in_round(3)
    bench.delivered(update(B, 3))
    commands = bench.wait(3 * 3600)
    assert (bench.phase, bench.barrier.round) == (Phase.COLLECTING, 3)
    assert only(Judge, commands) == []
    assert len(only(Announce, commands)) == 3 * 3600 / 5


def test_the_alarm_repeats_with_backoff() -> None:
    bench = Bench().in_round(3)
    bench.delivered(update(B, 3))
    began = bench.now
    at: list[float] = []
    for _ in range(round(1210 / TICK_S)):
        alarms = only(Alarm, bench.wait(TICK_S))
        assert all(alarm.kind == DEGRADED for alarm in alarms)
        at += [bench.now - began] * len(alarms)
    waits = [later - earlier for earlier, later in zip([0.0, *at], at, strict=False)]
    assert waits == [60, 90, 135, 202.5, 240, 240, 240]
    assert only(Alarm, bench.all)[0].text == (
        "round 3: waiting for c and d (1 of at least 2 updates here)"
    )


def test_the_backoff_of_the_alarm_restarts_with_every_round() -> None:
    bench = Bench().in_round(3)
    bench.wait(500, alive=[B, C, D])
    bench.finished_round(judge_in(bench.delivered(update(B, 3), update(C, 3), update(D, 3))))
    bench.sealed()
    assert len(only(Alarm, bench.wait(60, alive=[B, C, D]))) == 1
    assert len(only(Alarm, bench.wait(90, alive=[B, C, D]))) == 1


def test_there_is_no_alarm_with_a_quorum() -> None:
    bench = Bench()
    bench.parameters = replace(bench.parameters, grace_s=500.0)
    bench.in_round(3)
    bench.delivered(update(B, 3), update(C, 3))
    assert only(Alarm, bench.wait(400, alive=[D])) == []


def test_a_suspended_process_does_not_see_silent_peers() -> None:
    bench = Bench().in_round(3)
    bench.delivered(update(B, 3), update(C, 3))
    bench.now += 300  # stopped, and then continued
    assert only(Judge, bench.tell(Tick())) == []
    assert bench.barrier.standing(D, bench.now) is Standing.AWAITED
    assert "closing in 25 s" in bench.barrier.waiting_for(bench.now)
    assert judge_in(bench.wait(20)).why == "nobody to wait for with 2 of 3; d is silent"


# Deciding and merging.


def test_every_peer_has_a_verdict_in_the_decision() -> None:
    bench = Bench().in_round(3)
    bench.delivered(update(B, 3), update(C, 3))
    judge = judge_in(bench.wait(20.5))
    verdict = Verdict(C, True, Reason.OK, score=0.9, weight=0.5)
    [decide, merge] = bench.tell(Judged(Round(3), (verdict,)))
    assert isinstance(decide, Decide)
    decision = decide.decision
    assert merge == Merge(decision)
    assert decide.memory.decision == decision
    assert (decision.round, decision.cause, decision.why) == (3, judge.cause, judge.why)
    assert decision.accepted == (update(C, 3),)
    assert decision.verdicts == (
        Verdict(B, False, Reason.UNSCORED, digest=update(B, 3).digest),
        replace(verdict, digest=update(C, 3).digest),
        Verdict(D, False, Reason.UNREACHABLE),
    )


def test_rejecting_all_peers_still_advances() -> None:
    bench = Bench(peers=(B, C)).in_round(3)
    judge = judge_in(bench.delivered(update(B, 3), update(C, 3)))
    [decide] = only(Decide, bench.judged(judge, accept=False))
    assert decide.decision.accepted == ()
    commands = bench.tell(Merged(Round(3), MODEL))
    assert commands == [
        Commit(
            Round(3),
            MODEL,
            memory(4, announced=update(US, 3), **knowing(update(B, 3), update(C, 3))),
        ),
        Train(Round(4)),
    ]


def test_the_commit_comes_before_the_next_training() -> None:
    bench = Bench(peers=(B, C)).in_round(3)
    judge = judge_in(bench.delivered(update(B, 3), update(C, 5)))
    commands = bench.finished_round(judge)
    [commit] = only(Commit, commands)
    assert commit.memory == memory(
        4,
        announced=update(US, 3),
        used={B: age(0, 3), C: age(0, 5)},
        **knowing(update(B, 3), update(C, 5)),
    )
    assert commands.index(commit) < commands.index(Train(Round(5)))


def test_an_update_is_merged_at_most_once() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    bench.finished_round(judge_in(bench.delivered(update(B, 3), update(C, 9), update(D, 3))))
    bench.sealed()
    # It counts as delivered, but it was merged before.
    judge = judge_in(bench.delivered(update(B, 4), update(D, 4)))
    assert (judge.round, judge.cause) == (4, Cause.ALL)
    assert judge.updates == (update(B, 4), update(D, 4))
    assert judge.missing == ((C, Reason.STALE_ROUND),)


def test_a_fresh_update_is_fetched_although_a_used_one_still_counts() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    bench.finished_round(judge_in(bench.delivered(update(B, 3), update(C, 9), update(D, 3))))
    assert bench.tell(Announced(update(C, 10))) == [Fetch(update(C, 10))]


def test_an_update_used_before_a_restart_is_not_merged_again() -> None:
    used = {C: (Generation(0), Round(9))}
    known = memory(3, announced=update(US, 3), used=used)
    bench = Bench(faulty_max=1, remembers=known)
    bench.start()
    judge = judge_in(bench.delivered(update(B, 3), update(C, 9), update(D, 3)))
    assert judge.missing == ((C, Reason.STALE_ROUND),)


def test_a_lower_round_of_a_new_generation_can_be_merged() -> None:
    used = {B: (Generation(0), Round(9))}
    bench = Bench(min_peers=1, remembers=memory(3, announced=update(US, 3), used=used))
    bench.start()
    bench.delivered(update(B, 3, generation=1), update(C, 3))
    assert update(B, 3, generation=1) in judge_in(bench.delivered(update(D, 3))).updates
