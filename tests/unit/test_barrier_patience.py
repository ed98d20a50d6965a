"""How long a round waits for those who are missing, and when it goes on without them."""

from __future__ import annotations

import pytest

from lightyear_node.barrier import (
    LEFT_OUT,
    Alarm,
    Announced,
    Cause,
    Fetch,
    Fetched,
    FetchFailed,
    Heard,
    Judge,
    Phase,
    Standing,
    Tick,
)
from lightyear_node.barrier.patience import SAMPLES, SAMPLES_MIN, Patience
from lightyear_node.records import PeerName, Reason
from tests.unit.barrier_bench import TICK_S, B, Bench, C, D, judge_in, only, update

# How long is usual.


def patience_with(**late: list[float]) -> Patience:
    patience = Patience(grace_min_s=10.0, grace_s=100.0)
    for peer, samples in late.items():
        for late_s in samples:
            patience.arrived(PeerName(peer), late_s)
    return patience


@pytest.mark.parametrize(
    ("late", "grace_s"),
    [
        ([20.0, 20.0, 20.0], 30),  # as long as usual, and the shortest grace on top
        ([10.0, 20.0, 30.0], 20 + 4 * 10 + 10),
        ([10.0, 12.0, 14.0, 16.0, 18.0], 14 + 4 * 2 + 10),
        ([20.0, 20.0, 20.0, 20.0, 5000.0], 30),  # one hiccup is no habit
        ([0.0] * 5, 10),
        ([1000.0] * 5, 100),
        ([0.0, 50.0, 100.0], 100),
    ],
)
def test_the_grace_is_the_usual_delay_and_four_deviations_within_its_bounds(
    late: list[float], grace_s: float
) -> None:
    assert patience_with(d=late).grace_for([D]) == grace_s


@pytest.mark.parametrize("known", range(SAMPLES_MIN))
def test_of_whom_too_little_is_known_the_whole_grace_is_given(known: int) -> None:
    assert patience_with(d=[0.0] * known).grace_for([D]) == 100
    assert patience_with(d=[0.0] * known, c=[0.0] * 9).grace_for([C, D]) == 100


def test_the_slowest_of_those_who_are_missing_counts() -> None:
    patience = patience_with(b=[0.0] * 4, c=[40.0] * 4, d=[90.0] * 4)
    assert patience.grace_for([B]) == 10
    assert patience.grace_for([B, C]) == 50
    assert patience.grace_for([B, C, D]) == 100
    assert patience.grace_for([]) == 10


def test_only_the_last_few_delays_count() -> None:
    patience = patience_with(d=[80.0] * 50 + [20.0] * SAMPLES)
    assert patience.grace_for([D]) == 30
    assert len(patience._late_s[D]) == SAMPLES


def test_who_was_left_out_is_known_to_be_later_than_that() -> None:
    patience = patience_with(d=[0.0] * SAMPLES)
    waits = []
    for _ in range(20):
        waits.append(patience.grace_for([D]))
        patience.left_out(D, waits[-1])
    # It is soon given all the time there is, instead of being left out for ever.
    assert waits[0] == 10
    assert waits[-1] == 100
    assert waits.index(100) <= SAMPLES


def test_who_is_removed_is_forgotten() -> None:
    patience = patience_with(c=[0.0] * 4, d=[0.0] * 4)
    patience.reform(5.0, 60.0, [C])
    assert patience.grace_for([C]) == 5
    assert patience.grace_for([D]) == 60


# In rounds.


def adaptive(**terms: float) -> Bench:
    return Bench(**{"grace_s": 100.0, "grace_min_s": 10.0, **terms}).in_round(0)


def rounds_with(bench: Bench, late_s: float, rounds: int) -> None:
    """B and C deliver at once, and D so much later."""
    for _ in range(rounds):
        number = bench.barrier.round
        bench.delivered(update(B, number), update(C, number))
        assert only(Judge, bench.wait(late_s, alive=[D])) == []
        bench.finished_round(judge_in(bench.delivered(update(D, number))))
        bench.sealed()


def waited(bench: Bench) -> float:
    """How long the round is kept open for D, which does not come."""
    number = bench.barrier.round
    bench.delivered(update(B, number), update(C, number))
    began = bench.now
    while bench.phase is Phase.COLLECTING:
        bench.wait(TICK_S, alive=[B, C, D])
    return bench.now - began


@pytest.mark.parametrize(("late_s", "grace_s"), [(0.0, 10), (15.0, 25), (40.0, 50), (95.0, 100)])
def test_the_grace_follows_what_peers_usually_take(late_s: float, grace_s: float) -> None:
    bench = adaptive()
    rounds_with(bench, late_s, rounds=4)
    assert waited(bench) == grace_s


def test_at_first_the_grace_is_whole() -> None:
    assert waited(adaptive()) == 100


def test_the_shortest_and_the_longest_grace_may_be_the_same() -> None:
    bench = adaptive(grace_min_s=100.0)
    rounds_with(bench, 0.0, rounds=5)
    assert waited(bench) == 100


def test_what_comes_while_we_train_is_not_late() -> None:
    """We are the slow one: that is no reason to be patient with the others."""
    bench = adaptive()
    bench.finished_round(judge_in(bench.delivered(*(update(peer, 0) for peer in (B, C, D)))))
    for number in range(1, 5):
        bench.wait(300, alive=[B, C, D])
        bench.delivered(*(update(peer, number) for peer in (B, C, D)))
        bench.finished_round(judge_in(bench.sealed()))
    bench.sealed()
    assert waited(bench) == 10


def test_what_comes_after_its_round_is_no_sign_of_punctuality() -> None:
    bench = adaptive()
    rounds_with(bench, 0.0, rounds=4)
    for grace_s in (10, 10, 10, 10):
        number = bench.barrier.round
        assert waited(bench) == grace_s
        judge = judge_in(bench.all[-2:])
        bench.delivered(update(D, number))  # while we judge
        bench.finished_round(judge)
        bench.sealed()
    # It was left out four times, and has come in time four times.
    assert waited(bench) > 10


def test_a_quorum_that_comes_late_is_the_quorum_all_the_same() -> None:
    """What counts is how long after the others a peer comes, not how long after us."""
    bench = adaptive()
    for _ in range(4):
        number = bench.barrier.round
        bench.wait(500, alive=[B, C, D])
        bench.finished_round(
            judge_in(bench.delivered(*(update(peer, number) for peer in (B, C, D))))
        )
        bench.sealed()
    assert waited(bench) == 10


# Leaving out.


def test_who_is_left_out_is_named_aloud_before_the_round_is_judged() -> None:
    bench = Bench(peers=(B, C, D), min_peers=1).in_round(3)
    bench.delivered(update(B, 3))
    commands = bench.wait(30, alive=[C, D])
    [alarm] = only(Alarm, commands)
    assert (alarm.kind, alarm.peers) == (LEFT_OUT, (C, D))
    assert alarm.text == "round 3: closing without c and d"
    assert commands.index(alarm) < commands.index(judge_in(commands))


@pytest.mark.parametrize("silent", [False, True])
def test_nobody_is_left_out_who_is_not_there_or_has_delivered(silent: bool) -> None:
    bench = Bench(min_peers=1).in_round(3)
    bench.delivered(update(B, 3), update(C, 3))
    commands = bench.wait(60) if silent else bench.delivered(update(D, 3))
    assert judge_in(commands).cause is Cause.ALL
    assert only(Alarm, commands) == []


# Who is still at work.


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


def test_who_is_on_probation_gets_no_more_than_the_grace() -> None:
    """It would not be merged anyway, and whoever is reborn all the time would hold up everybody."""
    bench = slow_site(deadline_s=300)
    bench.tell(Announced(update(D, 2, generation=1)))
    assert judge_in(bench.wait(30, working=[D])).why == "grace over with 2 of 3; missing d"


def test_patience_returns_when_the_site_delivers() -> None:
    bench = slow_site(deadline_s=300)
    bench.finished_round(judge_in(bench.wait(300, working=[D])))
    bench.sealed()
    bench.finished_round(judge_in(bench.delivered(*(update(peer, 4) for peer in (B, C, D)))))
    bench.sealed()
    bench.delivered(update(B, 5), update(C, 5))
    assert only(Judge, bench.wait(299, working=[D])) == []


def test_progress_that_stands_still_is_not_believed() -> None:
    bench = slow_site(deadline_s=900)
    signs = [Heard(D, Phase.TRAINING, 7), Tick()]
    began = bench.now
    while bench.phase is Phase.COLLECTING:
        bench.now += TICK_S
        bench.tell(*signs)
    assert 120 < bench.now - began <= 121
    assert judge_in(bench.all[-2:]).why == "grace over with 2 of 3; missing d"


def test_progress_now_and_then_is_progress() -> None:
    bench = slow_site(deadline_s=900)
    for number in range(8):
        bench.tell(Heard(D, Phase.TRAINING, number))
        for _ in range(round(110 / TICK_S)):
            bench.now += TICK_S
            bench.tell(Heard(D, Phase.TRAINING, number), Tick())
    assert bench.phase is Phase.COLLECTING


@pytest.mark.parametrize("phase", [*Phase, "", "resting"])
def test_whoever_is_busy_with_its_model_is_at_work(phase: str) -> None:
    bench = slow_site(deadline_s=900)
    for number in range(round(300 / TICK_S)):
        bench.now += TICK_S
        bench.tell(Heard(D, phase, number), Tick())
    busy = {Phase.TRAINING, Phase.SEALING, Phase.JUDGING, Phase.MERGING}
    assert (bench.phase is Phase.COLLECTING) == (phase in busy)


def test_work_is_no_sign_of_a_quorum() -> None:
    """Whoever is at work is waited for; that does not replace those who must be here."""
    bench = Bench(deadline_s=300.0).in_round(3)
    bench.delivered(update(B, 3))
    assert only(Judge, bench.wait(2000, working=[C, D])) == []


def test_an_announcement_tells_of_work_too() -> None:
    bench = slow_site(deadline_s=300)
    for number in range(round(299 / TICK_S)):
        bench.now += TICK_S
        bench.tell(Announced(update(D, 2), Phase.TRAINING, number), Tick())
    assert bench.phase is Phase.COLLECTING


def test_who_falls_silent_at_work_is_not_waited_for() -> None:
    bench = slow_site(deadline_s=900)
    assert only(Judge, bench.wait(60, working=[D])) == []
    assert judge_in(bench.wait(21)).why == "nobody to wait for with 2 of 3; d is silent"


def test_an_update_that_is_arriving_is_waited_for_until_the_deadline() -> None:
    bench = slow_site(deadline_s=300)
    assert bench.tell(Announced(update(D, 3))) == [Fetch(update(D, 3))]
    assert only(Judge, bench.wait(200, alive=[D])) == []
    assert judge_in(bench.tell(Fetched(update(D, 3)))).why == "all 3 peers delivered"


def test_one_that_is_not_arriving_any_more_is_not() -> None:
    bench = slow_site(deadline_s=300)
    bench.tell(Announced(update(D, 3)))
    bench.wait(40, alive=[D])
    bench.tell(FetchFailed(update(D, 3), Reason.TIMEOUT, retriable=True))
    assert bench.phase is Phase.JUDGING


def test_one_that_never_stops_arriving_costs_one_deadline() -> None:
    bench = slow_site(deadline_s=300)
    bench.tell(Announced(update(D, 3)))
    assert only(Judge, bench.wait(299, alive=[D])) == []
    judge = judge_in(bench.wait(1, alive=[D]))
    assert judge.why == "deadline over with 2 of 3; missing d"
    bench.finished_round(judge)
    bench.sealed()
    bench.tell(Announced(update(D, 4)))
    bench.delivered(update(B, 4), update(C, 4))
    assert bench.barrier.standing(D, bench.now) is Standing.AWAITED
    assert judge_in(bench.wait(30, alive=[D])).why == "grace over with 2 of 3; missing d"
