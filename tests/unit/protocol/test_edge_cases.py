"""Boundary cases: one more, one less, just before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightyear_node.protocol.events import (
    Announced,
    Answered,
    Blocked,
    Finish,
    Heard,
    Judge,
    Note,
    Reconfigured,
    Reported,
    Seal,
    Sealed,
    Train,
    Trained,
)
from lightyear_node.protocol.parameters import Cause, Phase, Standing
from lightyear_node.protocol.state_machine import DEGRADED, LEFT_OUT, ROLLED_BACK, Barrier
from lightyear_node.types import Digest, PeerName, Reason, Round
from tests.support.barrier_bench import (
    US,
    WALL_S,
    B,
    Bench,
    C,
    D,
    judge_in,
    memory,
    noted,
    only,
    update,
)

# When a round closes.


def late(deadline_s: float, **parameters: float) -> Bench:
    """In round 3; B and C have delivered, D is known but late."""
    bench = Bench(deadline_s=deadline_s, **parameters).in_round(3)
    bench.tell(Announced(update(D, 2)))
    bench.delivered(update(B, 3), update(C, 3))
    return bench


def test_an_extension_in_one_round_does_not_count_in_the_next() -> None:
    bench = late(deadline_s=300)
    bench.wait(100, working=[D])
    bench.finished_round(judge_in(bench.delivered(update(D, 3))))
    bench.sealed()
    bench.delivered(update(B, 4), update(C, 4))
    bench.finished_round(judge_in(bench.wait(31, alive=[D])))  # no extension
    bench.sealed()
    bench.delivered(update(B, 5), update(C, 5))
    assert only(Judge, bench.wait(100, working=[D])) == []


def test_updates_that_were_complete_before_the_round_can_still_be_confirmed() -> None:
    bench = Bench(faulty_max=1, echo=True).in_round(3)
    all_peers = tuple(update(peer, 3) for peer in (B, C, D))
    bench.delivered(*all_peers)
    bench.tell(Reported(C, (update(B, 3), update(D, 3))))
    bench.finished_round(judge_in(bench.tell(Reported(D, (update(C, 3),)))))
    bench.wait(60, alive=[B, C, D])
    bench.delivered(*(update(peer, 4) for peer in (B, C, D)))
    assert only(Judge, bench.sealed()) == []
    assert only(Judge, bench.wait(14.5, alive=[B, C, D])) == []
    judge = judge_in(bench.wait(0.5, alive=[B, C, D]))
    assert {reason for _, reason in judge.missing} == {Reason.UNCONFIRMED}


def test_a_round_that_is_overtaken_at_once_has_its_own_grace_for_downloads() -> None:
    bench = Bench(peers=(B, C, D), min_peers=3).in_round(3)
    bench.tell(Announced(update(B, 4)))
    bench.wait(30, alive=[B, C, D])
    assert bench.phase is Phase.JUDGING
    bench.finished_round(judge_in(bench.all))
    [seal] = only(Seal, bench.tell(Trained(Digest("ours"))))
    bench.tell(Announced(update(B, 9)))  # and its update of round 4 is still on its way
    assert only(Judge, bench.tell(Sealed(seal.update))) == []
    assert only(Judge, bench.wait(29.5, alive=[B, C, D])) == []
    assert judge_in(bench.wait(0.5, alive=[B, C, D])).cause is Cause.OVERTAKEN


def test_a_deadline_not_above_the_maximum_grace_has_no_effect() -> None:
    bench = Bench(grace_s=100.0, grace_min_s=10.0, deadline_s=100.0).in_round(0)
    for number in range(4):
        bench.finished_round(judge_in(bench.delivered(*(update(p, number) for p in (B, C, D)))))
        bench.sealed()
    bench.delivered(update(B, 4), update(C, 4))
    assert judge_in(bench.wait(10, working=[D])).cause is Cause.GRACE


def test_the_status_at_the_end_of_the_grace_and_of_the_deadline() -> None:
    bench = late(deadline_s=300, suspect_s=5000)
    bench.wait(29.5, working=[D])
    assert "here; closing in 0 s)" in bench.barrier.waiting_for(bench.now)
    bench.wait(0.5, working=[D])
    assert "progress; closing in 270 s at the latest" in bench.barrier.waiting_for(bench.now)
    assert "closing in 0 s at the latest" in bench.barrier.waiting_for(bench.now + 900)


def test_alarms_have_the_names_used_in_logs_and_alert_rules() -> None:
    assert (DEGRADED, LEFT_OUT, ROLLED_BACK) == ("degraded", "left_out", "rolled_back")


def test_a_new_site_that_was_silent_for_a_round_still_gets_one_grace() -> None:
    bench = Bench().in_round(3)
    bench.delivered(update(B, 3), update(C, 3))
    judge = judge_in(bench.wait(21, alive=[B, C]))
    assert (judge.cause, judge.missing) == (Cause.ALL, ((D, Reason.UNREACHABLE),))
    bench.finished_round(judge)
    bench.tell(Heard(D))
    assert bench.barrier.standing(D, bench.now) is Standing.AWAITED


# Start, end and records.


def test_the_status_of_a_site_without_peers_before_its_start() -> None:
    bench = Bench(peers=(), min_peers=0)
    assert bench.barrier.waiting_for(0.0) == "looking for the other sites (0 of 0 have answered)"


def test_changing_members_after_the_last_round_does_not_finish_twice() -> None:
    bench = Bench(rounds=4, remembers=memory(4, announced=update(US, 3)))
    assert only(Finish, bench.start()) == [Finish()]
    commands = bench.tell(Reconfigured(replace(bench.parameters, peers=frozenset({B, C}))))
    assert [type(command) for command in commands] == [Note]


def test_blocked_peers_are_recorded_in_order() -> None:
    peers = frozenset(PeerName(f"site {number}") for number in range(10))
    bench = Bench()
    bench.start()
    assert noted("blocked", bench.tell(Blocked(peers))).about == {"peers": sorted(peers)}


def test_a_rollback_is_recorded_with_the_round_that_peers_hold() -> None:
    bench = Bench(remembers=memory(3, announced=update(US, 2)))
    bench.start(answering=False)
    note = noted("rollback", bench.tell(Answered(B, update(US, 7))))
    assert note.about == {"elsewhere": 7}


def test_the_first_generation_is_one() -> None:
    barrier = Barrier(US, Bench().parameters, memory(recovering=True))
    barrier.start(0.0, 0)
    commands = [command for peer in (B, C, D) for command in barrier.handle(Answered(peer), 0.0)]
    assert noted("generation", commands).about == {"generation": 1, "round": 0}


@pytest.mark.parametrize("reached", [2, 3, 4])
def test_a_site_that_loses_its_state_after_the_end_repeats_the_last_round(reached: int) -> None:
    known = memory(reached, announced=update(US, reached - 1), recovering=True)
    bench = Bench(rounds=4, remembers=known)
    note = noted("generation", bench.start())
    assert note.about == {"generation": WALL_S + 1, "round": min(reached, 3)}
    assert only(Train, bench.all) == [Train(Round(min(reached, 3)))]


def test_the_quota_is_refilled_with_every_round_of_our_own() -> None:
    bench = Bench().in_round(3)
    for number in range(3, 40):
        bench.tell(Announced(update(B, number)))
    withheld = bench.barrier.withheld[B]
    assert withheld
    bench.delivered(update(C, 3), update(D, 3))
    bench.finished_round(judge_in(bench.wait(31, alive=[B, C, D])))
    for number in range(40, 44):
        bench.tell(Announced(update(B, number)))
    assert bench.barrier.withheld[B] == withheld
    bench.tell(Announced(update(B, 44)))
    assert bench.barrier.withheld[B] == withheld + 1
