"""How long a round waits for missing peers, and when it closes without them."""

from __future__ import annotations

import pytest

from lightyear_node.protocol.events import (
    Alarm,
    Announced,
    Fetch,
    Fetched,
    FetchFailed,
    Heard,
    Judge,
    Judged,
    Merged,
    Tick,
)
from lightyear_node.protocol.grace_period import SAMPLES, SAMPLES_MIN, GracePeriod
from lightyear_node.protocol.parameters import Cause, Phase, Standing
from lightyear_node.protocol.state_machine import LEFT_OUT
from lightyear_node.types import PeerName, Reason, Verdict
from tests.support.barrier_bench import MODEL, TICK_S, B, Bench, C, D, judge_in, only, update

# Usual delays.


def grace_period_with(**late: list[float]) -> GracePeriod:
    grace_period = GracePeriod(grace_min_s=10.0, grace_s=100.0)
    for peer, samples in late.items():
        for late_s in samples:
            grace_period.arrived(PeerName(peer), late_s)
    return grace_period


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
    assert grace_period_with(d=late).grace_for([D]) == grace_s


@pytest.mark.parametrize("known", range(SAMPLES_MIN))
def test_an_unknown_peer_gets_the_whole_grace(known: int) -> None:
    assert grace_period_with(d=[0.0] * known).grace_for([D]) == 100
    assert grace_period_with(d=[0.0] * known, c=[0.0] * 9).grace_for([C, D]) == 100


def test_the_slowest_missing_peer_determines_the_grace() -> None:
    grace_period = grace_period_with(b=[0.0] * 4, c=[40.0] * 4, d=[90.0] * 4)
    assert grace_period.grace_for([B]) == 10
    assert grace_period.grace_for([B, C]) == 50
    assert grace_period.grace_for([B, C, D]) == 100
    assert grace_period.grace_for([]) == 10
    assert GracePeriod(grace_min_s=0.0, grace_s=100.0).grace_for([]) == 0


def test_only_recent_delays_count() -> None:
    grace_period = grace_period_with(d=[80.0] * 50 + [20.0] * SAMPLES)
    assert grace_period.grace_for([D]) == 30


def test_a_left_out_peer_counts_as_later_than_the_wait() -> None:
    grace_period = grace_period_with(d=[0.0] * SAMPLES)
    waits = []
    for _ in range(20):
        waits.append(grace_period.grace_for([D]))
        grace_period.left_out(D, waits[-1])
    # It soon gets the maximum instead of being left out for ever.
    assert waits[0] == 10
    assert waits[-1] == 100
    assert waits.index(100) <= SAMPLES


def test_a_left_out_peer_counts_as_one_and_a_half_times_the_wait() -> None:
    grace_period = grace_period_with()
    for _ in range(4):
        grace_period.left_out(D, 20.0)
    assert grace_period.grace_for([D]) == 30 + 10


def test_delays_of_removed_peers_are_forgotten() -> None:
    grace_period = grace_period_with(c=[0.0] * 4, d=[0.0] * 4)
    grace_period.reconfigure(5.0, 60.0, [C])
    assert grace_period.grace_for([C]) == 5
    assert grace_period.grace_for([D]) == 60


# In rounds.


def adaptive(**parameters: float) -> Bench:
    return Bench(**{"grace_s": 100.0, "grace_min_s": 10.0, **parameters}).in_round(0)


def rounds_with(bench: Bench, late_s: float, rounds: int) -> None:
    """B and C deliver at once, and D this much later."""
    for _ in range(rounds):
        number = bench.barrier.round
        bench.delivered(update(B, number), update(C, number))
        assert only(Judge, bench.wait(late_s, alive=[D])) == []
        bench.finished_round(judge_in(bench.delivered(update(D, number))))
        bench.sealed()


def waited(bench: Bench) -> float:
    """How long the round stays open for D, which does not deliver."""
    number = bench.barrier.round
    bench.delivered(update(B, number), update(C, number))
    began = bench.now
    while bench.phase is Phase.COLLECTING:
        bench.wait(TICK_S, alive=[B, C, D])
    return bench.now - began


@pytest.mark.parametrize(("late_s", "grace_s"), [(0.0, 10), (15.0, 25), (40.0, 50), (95.0, 100)])
def test_the_grace_follows_the_usual_delays(late_s: float, grace_s: float) -> None:
    bench = adaptive()
    rounds_with(bench, late_s, rounds=4)
    assert waited(bench) == grace_s


def test_the_first_grace_is_the_maximum() -> None:
    assert waited(adaptive()) == 100


def test_the_shortest_and_the_longest_grace_may_be_the_same() -> None:
    bench = adaptive(grace_min_s=100.0)
    rounds_with(bench, 0.0, rounds=5)
    assert waited(bench) == 100


def test_an_update_during_our_training_is_not_late() -> None:
    """We are the slow site, so the peers' delay is 0."""
    bench = adaptive()
    bench.finished_round(judge_in(bench.delivered(*(update(peer, 0) for peer in (B, C, D)))))
    for number in range(1, 5):
        bench.wait(300, alive=[B, C, D])
        bench.delivered(*(update(peer, number) for peer in (B, C, D)))
        bench.finished_round(judge_in(bench.sealed()))
    bench.sealed()
    assert waited(bench) == 10


def test_an_update_after_its_round_does_not_count_as_punctual() -> None:
    bench = adaptive()
    rounds_with(bench, 0.0, rounds=3)
    for grace_s in (10, 10, 10):
        number = bench.barrier.round
        assert waited(bench) == grace_s
        judge = judge_in(bench.all[-2:])
        bench.delivered(update(D, number))  # while we judge
        bench.finished_round(judge)
        bench.sealed()
    # It was in time three times, and left out three times after 10 s, which counts as 15 s.
    assert waited(bench) == 7.5 + 4 * 7.5 + 10


def test_an_update_before_the_quorum_has_no_delay() -> None:
    bench = adaptive(grace_s=1000.0)
    rounds_with(bench, 40.0, rounds=2)
    for number in (2, 3):
        bench.delivered(update(D, number))
        bench.finished_round(judge_in(bench.delivered(update(B, number), update(C, number))))
        bench.sealed()
    assert waited(bench) == 20 + 4 * 20 + 10


def test_delays_count_from_a_late_quorum() -> None:
    """A delay is measured from the quorum, not from our own update."""
    bench = adaptive()
    for _ in range(4):
        number = bench.barrier.round
        bench.wait(500, alive=[B, C, D])
        bench.finished_round(
            judge_in(bench.delivered(*(update(peer, number) for peer in (B, C, D))))
        )
        bench.sealed()
    assert waited(bench) == 10


# Left out peers.


def test_left_out_peers_are_named_in_an_alarm_before_judging() -> None:
    bench = Bench(peers=(B, C, D), min_peers=1).in_round(3)
    bench.delivered(update(B, 3))
    commands = bench.wait(30, alive=[C, D])
    [alarm] = only(Alarm, commands)
    assert (alarm.kind, alarm.peers) == (LEFT_OUT, (C, D))
    assert alarm.text == "round 3: closing without c and d"
    assert commands.index(alarm) < commands.index(judge_in(commands))


@pytest.mark.parametrize("silent", [False, True])
def test_silent_or_delivered_peers_are_not_left_out(silent: bool) -> None:
    bench = Bench(min_peers=1).in_round(3)
    bench.delivered(update(B, 3), update(C, 3))
    commands = bench.wait(60) if silent else bench.delivered(update(D, 3))
    assert judge_in(commands).cause is Cause.ALL
    assert only(Alarm, commands) == []


# Extensions for peers that make progress.


def slow_site(deadline_s: float) -> Bench:
    """In round 3; B and C have delivered, D is known but late."""
    bench = Bench(deadline_s=deadline_s).in_round(3)
    bench.tell(Announced(update(D, 2)))
    bench.delivered(update(B, 3), update(C, 3))
    return bench


def test_without_a_deadline_a_slow_site_gets_only_the_grace() -> None:
    bench = slow_site(deadline_s=0)
    assert judge_in(bench.wait(30, working=[D])).why == "grace over with 2 of 3; missing d"


def test_a_training_peer_is_waited_for_until_the_deadline() -> None:
    bench = slow_site(deadline_s=300)
    assert only(Judge, bench.wait(299, working=[D])) == []
    assert "still making progress; closing in 1 s at the latest" in bench.barrier.waiting_for(
        bench.now
    )
    judge = judge_in(bench.wait(1, working=[D]))
    assert (judge.cause, judge.missing) == (Cause.GRACE, ((D, Reason.TIMEOUT),))
    assert judge.why == "deadline over with 2 of 3; missing d"


def test_a_peer_that_stops_training_is_not_waited_for() -> None:
    bench = slow_site(deadline_s=300)
    assert only(Judge, bench.wait(100, working=[D])) == []
    assert judge_in(bench.wait(TICK_S, alive=[D])).cause is Cause.GRACE


def test_a_wasted_extension_is_granted_once() -> None:
    """A site that pretends to work costs one deadline, not one per round."""
    bench = slow_site(deadline_s=300)
    bench.finished_round(judge_in(bench.wait(300, working=[D])))
    bench.sealed()
    bench.delivered(update(B, 4), update(C, 4))
    assert judge_in(bench.wait(30, working=[D])).why == "grace over with 2 of 3; missing d"


def test_a_peer_on_probation_gets_only_the_grace() -> None:
    """It would not be merged, and repeated restarts must not delay every round."""
    bench = slow_site(deadline_s=300)
    bench.tell(Announced(update(D, 2, generation=1)))
    assert judge_in(bench.wait(30, working=[D])).why == "grace over with 2 of 3; missing d"


def test_extensions_return_when_the_peer_delivers() -> None:
    bench = slow_site(deadline_s=300)
    bench.finished_round(judge_in(bench.wait(300, working=[D])))
    bench.sealed()
    bench.finished_round(judge_in(bench.delivered(*(update(peer, 4) for peer in (B, C, D)))))
    bench.sealed()
    bench.delivered(update(B, 5), update(C, 5))
    assert only(Judge, bench.wait(299, working=[D])) == []


def late_rejected_update(bench: Bench, round: int) -> bool:
    """D works until just before the deadline, and then delivers an update that is rejected.

    Returns whether the round waited that long.
    """
    waited = bench.delivered(update(B, round), update(C, round))
    waited += bench.wait(299, working=[D])
    extended = only(Judge, waited) == []
    judge = judge_in(bench.delivered(update(D, round)) if extended else waited)
    verdicts = tuple(
        Verdict(each.peer, each.peer != D, Reason.OK if each.peer != D else Reason.TOO_FAR)
        for each in judge.updates
    )
    bench.tell(Judged(judge.round, verdicts), Merged(judge.round, MODEL))
    bench.sealed()
    return extended


def all_accepted(bench: Bench, round: int) -> None:
    bench.finished_round(judge_in(bench.delivered(*(update(peer, round) for peer in (B, C, D)))))
    bench.sealed()


def test_rejected_updates_before_every_deadline_cost_one_deadline() -> None:
    bench = slow_site(deadline_s=300)
    assert [late_rejected_update(bench, round) for round in range(3, 9)] == [True] + 5 * [False]


def test_a_failed_download_before_the_deadline_wastes_the_extension() -> None:
    bench = slow_site(deadline_s=300)
    bench.tell(Announced(update(D, 3)))
    bench.wait(290, alive=[D])
    failed = FetchFailed(update(D, 3), Reason.CHECKSUM, retriable=False)
    bench.finished_round(judge_in(bench.tell(failed)))
    bench.sealed()
    bench.delivered(update(B, 4), update(C, 4))
    assert judge_in(bench.wait(30, working=[D])).why == "grace over with 2 of 3; missing d"


def test_alternating_good_and_bad_updates_earn_ever_fewer_extensions() -> None:
    """Each further extension costs a peer twice as many good updates."""
    bench = slow_site(deadline_s=300)
    waited, round = 0, 3
    for _ in range(20):
        waited += late_rejected_update(bench, round)
        all_accepted(bench, round + 1)
        round += 2
    assert waited == 5  # after 0, 1, 2, 4 and 8 good ones


def test_unchanged_progress_is_no_progress() -> None:
    bench = slow_site(deadline_s=900)
    signs = [Heard(D, Phase.TRAINING, 7), Tick()]
    began = bench.now
    while bench.phase is Phase.COLLECTING:
        bench.now += TICK_S
        bench.tell(*signs)
    assert 120 < bench.now - began <= 121
    assert judge_in(bench.all[-2:]).why == "grace over with 2 of 3; missing d"


def test_slow_progress_is_progress() -> None:
    bench = slow_site(deadline_s=900)
    for number in range(8):
        bench.tell(Heard(D, Phase.TRAINING, number))
        for _ in range(round(110 / TICK_S)):
            bench.now += TICK_S
            bench.tell(Heard(D, Phase.TRAINING, number), Tick())
    assert bench.phase is Phase.COLLECTING


@pytest.mark.parametrize("phase", [*Phase, "", "resting"])
def test_every_computing_phase_counts_as_working(phase: str) -> None:
    bench = slow_site(deadline_s=900)
    for number in range(round(300 / TICK_S)):
        bench.now += TICK_S
        bench.tell(Heard(D, phase, number), Tick())
    busy = {Phase.TRAINING, Phase.SEALING, Phase.JUDGING, Phase.MERGING}
    assert (bench.phase is Phase.COLLECTING) == (phase in busy)


def test_working_peers_do_not_count_towards_the_quorum() -> None:
    """The round waits for working peers, but they do not replace the quorum."""
    bench = Bench(deadline_s=300.0).in_round(3)
    bench.delivered(update(B, 3))
    assert only(Judge, bench.wait(2000, working=[C, D])) == []


def test_an_announcement_also_reports_progress() -> None:
    bench = slow_site(deadline_s=300)
    for number in range(round(299 / TICK_S)):
        bench.now += TICK_S
        bench.tell(Announced(update(D, 2), Phase.TRAINING, number), Tick())
    assert bench.phase is Phase.COLLECTING


def test_a_working_peer_that_falls_silent_is_not_waited_for() -> None:
    bench = slow_site(deadline_s=900)
    assert only(Judge, bench.wait(60, working=[D])) == []
    assert judge_in(bench.wait(21)).why == "nobody to wait for with 2 of 3; d is silent"


def test_a_running_download_is_waited_for_until_the_deadline() -> None:
    bench = slow_site(deadline_s=300)
    assert bench.tell(Announced(update(D, 3))) == [Fetch(update(D, 3))]
    assert only(Judge, bench.wait(200, alive=[D])) == []
    assert judge_in(bench.tell(Fetched(update(D, 3)))).why == "all 3 peers delivered"


def test_a_stopped_download_is_not_waited_for() -> None:
    bench = slow_site(deadline_s=300)
    bench.tell(Announced(update(D, 3)))
    bench.wait(40, alive=[D])
    bench.tell(FetchFailed(update(D, 3), Reason.TIMEOUT, retriable=True))
    assert bench.phase is Phase.JUDGING


def test_an_endless_download_costs_one_deadline() -> None:
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
