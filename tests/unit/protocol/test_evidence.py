"""A peer that signs two updates for one round: detection, quarantine, unquarantine."""

from __future__ import annotations

import pytest

from lightyear_node.errors import BarrierMisuse
from lightyear_node.protocol.events import (
    Accuse,
    Accused,
    Announced,
    Answered,
    Decide,
    Event,
    Fetch,
    Fetched,
    FetchFailed,
    Judged,
    Merge,
    Reported,
    Unquarantined,
)
from lightyear_node.protocol.parameters import Cause, Phase, Standing
from lightyear_node.protocol.state_machine import Barrier
from lightyear_node.types import PeerName, Reason, Update, Verdict
from tests.support.barrier_bench import (
    US,
    B,
    Bench,
    C,
    D,
    age,
    judge_in,
    memory,
    noted,
    only,
    update,
)

ONE, OTHER = update(B, 3), update(B, 3, variant="'")


def with_b_quarantined() -> Bench:
    """In round 3, after B was quarantined."""
    bench = Bench(faulty_max=1).in_round(3)
    bench.tell(Announced(ONE), Announced(OTHER))
    bench.tell(FetchFailed(ONE, Reason.TIMEOUT, retriable=True))
    assert bench.barrier.standing(B, bench.now) is Standing.QUARANTINED
    return bench


# Detection.


@pytest.mark.parametrize(
    "events",
    [
        (Announced(ONE), Announced(OTHER)),
        (Announced(ONE), Reported(C, (OTHER,))),
        (Reported(C, (ONE,)), Reported(D, (OTHER,))),
        (Reported(C, (ONE, OTHER)),),
        (Accused(ONE, OTHER),),
        # It has announced later updates, but the first is still known.
        (Announced(ONE), Announced(update(B, 4)), Reported(C, (OTHER,))),
        # The newest is of another generation; the first two still contradict.
        (Announced(ONE), Announced(update(B, 4, generation=1)), Reported(C, (OTHER,))),
    ],
)
def test_two_updates_of_one_age_are_evidence_from_any_source(events: tuple[Event, ...]) -> None:
    bench = Bench(faulty_max=1).in_round(3)
    commands = bench.tell(*events)
    [accuse] = only(Accuse, commands)
    assert (accuse.first, accuse.second) == (ONE, OTHER)
    assert accuse.memory.quarantined == {B: age(0, 3)}
    assert bench.barrier.standing(B, bench.now) is Standing.QUARANTINED


def test_evidence_is_found_across_a_restart() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    bench.tell(Announced(ONE))
    durable = noted("witness", bench.wait(5)).memory
    again = bench.restarted(durable)
    again.start()
    assert only(Accuse, again.tell(Announced(OTHER))) != []


@pytest.mark.parametrize(
    "events",
    [
        (Announced(ONE), Announced(ONE), Reported(C, (ONE,))),
        (Announced(ONE), Announced(update(B, 4)), Announced(update(B, 5))),
        (Announced(ONE), Announced(update(B, 3, generation=1))),  # a lost memory
        (Reported(C, (ONE, update(D, 3))),),
    ],
)
def test_honest_updates_are_no_evidence(events: tuple[Event, ...]) -> None:
    bench = Bench(faulty_max=1).in_round(3)
    assert only(Accuse, bench.tell(*events)) == []


def test_one_accusation_is_recorded_once() -> None:
    bench = with_b_quarantined()
    again = bench.tell(Accused(ONE, OTHER), Reported(C, (ONE,)), Accused(OTHER, ONE))
    assert only(Accuse, again) == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ONE, ONE),
        (ONE, update(B, 4)),
        (ONE, update(C, 3)),
        (ONE, update(B, 3, generation=1)),
    ],
)
def test_an_invalid_accusation_is_refused_without_change(first: Update, second: Update) -> None:
    bench = Bench(faulty_max=1).in_round(3)
    before = bench.state
    bench.now += 1
    with pytest.raises(BarrierMisuse):
        bench.tell(Accused(first, second))
    assert bench.state == before


def test_evidence_about_non_members_is_ignored() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    before = bench.state
    stranger = PeerName("x")
    one, other = update(stranger, 3), update(stranger, 3, variant="'")
    assert bench.tell(Accused(one, other), Reported(C, (one, other)), Unquarantined(stranger)) == []
    bench.tell(Reported(stranger, (one,)))
    assert bench.state == before


def test_a_report_by_a_non_member_counts_because_the_peer_signed_it() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    commands = bench.tell(Reported(PeerName("x"), (ONE,)), Announced(OTHER))
    assert only(Accuse, commands) != []


# Quarantine.


def test_quarantine_survives_a_restart() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    [accuse] = only(Accuse, bench.tell(Accused(ONE, OTHER)))
    again = bench.restarted(accuse.memory)
    again.start(answering=False)
    # The site does not wait for its answer.
    again.tell(Answered(C), Answered(D))
    assert again.phase is Phase.COLLECTING
    assert again.tell(Announced(update(B, 4))) == []
    assert again.barrier.standing(B, again.now) is Standing.QUARANTINED


def test_updates_of_quarantined_peers_are_not_fetched() -> None:
    bench = with_b_quarantined()
    commands = bench.tell(Announced(update(B, 4)), Reported(C, (update(B, 5),)))
    assert only(Fetch, commands + bench.wait(30, alive=[B, C, D])) == []


def test_a_running_fetch_of_a_quarantined_peer_is_not_used() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    bench.tell(Announced(ONE), Announced(OTHER))
    bench.tell(Fetched(ONE))
    assert bench.barrier.standing(B, bench.now) is Standing.QUARANTINED
    judge = judge_in(bench.delivered(update(C, 3), update(D, 3)))
    assert judge.updates == (update(C, 3), update(D, 3))


def test_quarantined_peers_neither_count_as_delivered_nor_are_waited_for() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    bench.delivered(ONE, update(C, 3))
    bench.tell(Accused(ONE, OTHER))
    assert bench.phase is Phase.COLLECTING  # one of two
    judge = judge_in(bench.delivered(update(D, 3)))
    assert (judge.cause, judge.missing) == (Cause.ALL, ((B, Reason.QUARANTINED),))
    assert judge.why == "nobody to wait for with 2 of 3; b is quarantined"


def test_quarantined_peers_do_not_advance_the_supported_round() -> None:
    bench = with_b_quarantined()
    bench.tell(Announced(update(B, 9)), Announced(update(C, 9)))
    bench.tell(FetchFailed(update(C, 9), Reason.TIMEOUT, retriable=False))
    bench.wait(60, alive=[B, C, D])
    assert (bench.phase, bench.barrier.round) == (Phase.COLLECTING, 3)


def test_a_quarantined_peer_no_longer_counts_as_beyond() -> None:
    bench = Bench(faulty_max=1)
    bench.start()
    bench.tell(Announced(update(B, 9)), Announced(update(C, 9)))
    bench.tell(Announced(update(B, 9, variant="'")))
    bench.sealed()
    assert bench.barrier.round == 0


def test_a_peer_quarantined_during_judging_is_not_merged() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    judge = judge_in(bench.delivered(ONE, update(C, 3), update(D, 3)))
    bench.tell(Reported(C, (OTHER,)))
    verdicts = tuple(Verdict(peer, True, Reason.OK, weight=0.3) for peer in (B, C, D))
    [decide] = only(Decide, bench.tell(Judged(judge.round, verdicts)))
    assert decide.decision.accepted == (update(C, 3), update(D, 3))
    assert decide.decision.verdicts[0] == Verdict(
        B, False, Reason.QUARANTINED, weight=0.0, digest=ONE.digest
    )


def test_a_decision_stands_although_its_peer_is_quarantined_later() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    judge = judge_in(bench.delivered(ONE, update(C, 3), update(D, 3)))
    [decide] = only(Decide, bench.judged(judge))
    [accuse] = only(Accuse, bench.tell(Accused(ONE, OTHER)))
    assert accuse.memory.decision == decide.decision
    assert Merge(decide.decision) in bench.restarted(accuse.memory).start()


def test_two_faulty_peers_are_quarantined_separately() -> None:
    bench = with_b_quarantined()
    [accuse] = only(Accuse, bench.tell(Accused(update(C, 1), update(C, 1, variant="'"))))
    assert accuse.memory.quarantined == {B: age(0, 3), C: age(0, 1)}


# Unquarantine.


def test_unquarantining_is_durable() -> None:
    bench = with_b_quarantined()
    note = noted("pardon", bench.tell(Unquarantined(B)))
    assert note.about == {"peer": B}
    assert (note.memory.quarantined, note.memory.unquarantined) == ({}, {B: age(0, 3)})
    for each in (bench, bench.restarted(note.memory)):
        if each is not bench:
            each.start()
        assert each.tell(Announced(update(B, 4))) == [Fetch(update(B, 4))]
        each.tell(Fetched(update(B, 4)))
        assert each.barrier.standing(B, each.now) is Standing.DELIVERED


def test_only_a_quarantined_peer_can_be_unquarantined() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    assert bench.tell(Unquarantined(B)) == []
    # and so has nothing to its credit
    assert only(Accuse, bench.tell(Accused(ONE, OTHER))) != []


@pytest.mark.parametrize(
    "old",
    [
        Accused(ONE, OTHER),
        Accused(OTHER, ONE),
        Accused(update(B, 1), update(B, 1, variant="'")),
        Reported(C, (ONE,)),
        Reported(C, (OTHER,)),
        Announced(OTHER),
    ],
)
@pytest.mark.parametrize("restart", [False, True])
def test_old_evidence_does_not_quarantine_again(old: Event, restart: bool) -> None:
    bench = with_b_quarantined()
    note = noted("pardon", bench.tell(Unquarantined(B)))
    if restart:
        bench = bench.restarted(note.memory)
        bench.start()
    assert only(Accuse, bench.tell(old)) == []
    assert bench.barrier.standing(B, bench.now) is not Standing.QUARANTINED


@pytest.mark.parametrize("generation", [0, 1])
def test_new_evidence_quarantines_again(generation: int) -> None:
    bench = with_b_quarantined()
    bench.tell(Unquarantined(B))
    bench.tell(Announced(update(B, 4, generation)))
    [accuse] = only(Accuse, bench.tell(Announced(update(B, 4, generation, variant="'"))))
    assert accuse.memory.quarantined == {B: age(generation, 4)}
    assert accuse.memory.unquarantined == {B: age(0, 3)}
    bench.tell(Unquarantined(B))
    assert only(Accuse, bench.tell(Accused(ONE, OTHER))) == []


def test_updates_up_to_an_unquarantine_are_not_used() -> None:
    """Otherwise a peer caught with a very late update could lie freely below it afterwards."""
    bench = Bench(faulty_max=1).in_round(3)
    late = update(B, 10**9, generation=10**9)
    bench.tell(Accused(late, update(B, 10**9, generation=10**9, variant="'")), Unquarantined(B))
    for each in (ONE, OTHER, late):
        assert only(Fetch, bench.tell(Announced(each), Reported(C, (each,)))) == []
    assert bench.barrier.standing(B, bench.now) is Standing.AWAITED


def test_updates_fetched_before_an_unquarantine_are_not_used() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    bench.delivered(ONE)
    bench.tell(Accused(ONE, OTHER), Unquarantined(B))
    assert bench.barrier.standing(B, bench.now) is not Standing.DELIVERED
    bench = Bench(faulty_max=1).in_round(3)
    bench.tell(Announced(ONE), Accused(ONE, OTHER), Unquarantined(B))
    bench.tell(Announced(update(B, 4)))
    assert bench.tell(Fetched(ONE)) == [Fetch(update(B, 4))]
    assert bench.barrier.standing(B, bench.now) is Standing.AWAITED


def test_neither_this_site_nor_a_reporter_is_quarantined() -> None:
    """A peer that only forwards evidence is not quarantined."""
    bench = Bench(faulty_max=1).in_round(3)
    bench.tell(Reported(C, (ONE, OTHER)), Accused(update(US, 3), update(US, 3, variant="'")))
    assert bench.barrier.durable_state().quarantined.keys() == {B}


def test_evidence_counts_against_blocked_peers() -> None:
    known = memory(3, announced=update(US, 3), blocked=frozenset({B}))
    bench = Bench(faulty_max=1)
    bench.barrier = Barrier(US, bench.parameters, known)
    bench.start()
    [accuse] = only(Accuse, bench.tell(Announced(ONE), Announced(OTHER)))
    assert accuse.memory.blocked == accuse.memory.quarantined.keys() == {B}
