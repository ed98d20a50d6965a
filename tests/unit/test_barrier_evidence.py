"""A peer that tells two stories: how it is found out, what follows, and who can forgive it."""

from __future__ import annotations

import pytest

from lightyear_node.barrier import (
    Accuse,
    Accused,
    Announced,
    Answered,
    Barrier,
    Cause,
    Decide,
    Event,
    Fetch,
    Fetched,
    FetchFailed,
    Judged,
    Merge,
    Pardoned,
    Phase,
    Reported,
    Standing,
)
from lightyear_node.errors import BarrierMisuse
from lightyear_node.records import PeerName, Reason, Update, Verdict
from tests.unit.barrier_bench import (
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

ONE, OTHER = update(B, 3), update(B, 3, story="'")


def found_out() -> Bench:
    """In round 3, after B has been caught."""
    bench = Bench(faulty_max=1).in_round(3)
    bench.tell(Announced(ONE), Announced(OTHER))
    bench.tell(FetchFailed(ONE, Reason.TIMEOUT, retriable=True))
    assert bench.barrier.standing(B, bench.now) is Standing.QUARANTINED
    return bench


# Finding out.


@pytest.mark.parametrize(
    "events",
    [
        (Announced(ONE), Announced(OTHER)),
        (Announced(ONE), Reported(C, (OTHER,))),
        (Reported(C, (ONE,)), Reported(D, (OTHER,))),
        (Reported(C, (ONE, OTHER)),),
        (Accused(ONE, OTHER),),
        # It has gone on meanwhile, but we remember.
        (Announced(ONE), Announced(update(B, 4)), Reported(C, (OTHER,))),
        # The newest is of another generation; that does not make the two stories one.
        (Announced(ONE), Announced(update(B, 4, generation=1)), Reported(C, (OTHER,))),
    ],
)
def test_two_updates_of_one_age_are_evidence_however_they_come(events: tuple[Event, ...]) -> None:
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
def test_an_honest_life_is_no_evidence(events: tuple[Event, ...]) -> None:
    bench = Bench(faulty_max=1).in_round(3)
    assert only(Accuse, bench.tell(*events)) == []


def test_one_accusation_is_enough() -> None:
    bench = found_out()
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
def test_an_accusation_that_proves_nothing_is_refused_without_change(
    first: Update, second: Update
) -> None:
    bench = Bench(faulty_max=1).in_round(3)
    before = bench.state
    bench.now += 1
    with pytest.raises(BarrierMisuse):
        bench.tell(Accused(first, second))
    assert bench.state == before


def test_strangers_are_neither_accused_nor_believed() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    before = bench.state
    stranger = PeerName("x")
    one, other = update(stranger, 3), update(stranger, 3, story="'")
    assert bench.tell(Accused(one, other), Reported(C, (one, other)), Pardoned(stranger)) == []
    bench.tell(Reported(stranger, (one,)))
    assert bench.state == before


def test_what_a_stranger_tells_of_a_peer_is_signed_by_the_peer() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    commands = bench.tell(Reported(PeerName("x"), (ONE,)), Announced(OTHER))
    assert only(Accuse, commands) != []


# What follows.


def test_quarantine_survives_a_restart() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    [accuse] = only(Accuse, bench.tell(Accused(ONE, OTHER)))
    again = bench.restarted(accuse.memory)
    again.start(answering=False)
    # It need not answer either.
    again.tell(Answered(C), Answered(D))
    assert again.phase is Phase.COLLECTING
    assert again.tell(Announced(update(B, 4))) == []
    assert again.barrier.standing(B, again.now) is Standing.QUARANTINED


def test_the_quarantined_are_not_fetched() -> None:
    bench = found_out()
    commands = bench.tell(Announced(update(B, 4)), Reported(C, (update(B, 5),)))
    assert only(Fetch, commands + bench.wait(30, alive=[B, C, D])) == []


def test_a_fetch_that_was_under_way_is_not_used() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    bench.tell(Announced(ONE), Announced(OTHER))
    bench.tell(Fetched(ONE))
    assert bench.barrier.standing(B, bench.now) is Standing.QUARANTINED
    judge = judge_in(bench.delivered(update(C, 3), update(D, 3)))
    assert judge.updates == (update(C, 3), update(D, 3))


def test_the_quarantined_do_not_count_as_delivered_nor_are_they_waited_for() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    bench.delivered(ONE, update(C, 3))
    bench.tell(Accused(ONE, OTHER))
    assert bench.phase is Phase.COLLECTING  # one of two
    judge = judge_in(bench.delivered(update(D, 3)))
    assert (judge.cause, judge.missing) == (Cause.ALL, ((B, Reason.QUARANTINED),))
    assert judge.why == "nobody to wait for with 2 of 3; b is quarantined"


def test_the_quarantined_do_not_pull_us_forward() -> None:
    bench = found_out()
    bench.tell(Announced(update(B, 9)), Announced(update(C, 9)))
    bench.tell(FetchFailed(update(C, 9), Reason.TIMEOUT, retriable=False))
    bench.wait(60, alive=[B, C, D])
    assert (bench.phase, bench.barrier.round) == (Phase.COLLECTING, 3)


def test_who_was_beyond_us_is_no_longer_when_it_is_found_out() -> None:
    bench = Bench(faulty_max=1)
    bench.start()
    bench.tell(Announced(update(B, 9)), Announced(update(C, 9)))
    bench.tell(Announced(update(B, 9, story="'")))
    bench.sealed()
    assert bench.barrier.round == 0


def test_who_is_found_out_while_being_judged_is_not_merged() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    judge = judge_in(bench.delivered(ONE, update(C, 3), update(D, 3)))
    bench.tell(Reported(C, (OTHER,)))
    verdicts = tuple(Verdict(peer, True, Reason.OK, weight=0.3) for peer in (B, C, D))
    [decide] = only(Decide, bench.tell(Judged(judge.round, verdicts)))
    assert decide.decision.accepted == (update(C, 3), update(D, 3))
    assert decide.decision.verdicts[0] == Verdict(
        B, False, Reason.QUARANTINED, weight=0.0, digest=ONE.digest
    )


def test_a_decision_stands_although_its_peer_is_found_out_later() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    judge = judge_in(bench.delivered(ONE, update(C, 3), update(D, 3)))
    [decide] = only(Decide, bench.judged(judge))
    [accuse] = only(Accuse, bench.tell(Accused(ONE, OTHER)))
    assert accuse.memory.decision == decide.decision
    assert Merge(decide.decision) in bench.restarted(accuse.memory).start()


def test_two_liars_are_told_apart() -> None:
    bench = found_out()
    [accuse] = only(Accuse, bench.tell(Accused(update(C, 1), update(C, 1, story="'"))))
    assert accuse.memory.quarantined == {B: age(0, 3), C: age(0, 1)}


# Forgiving.


def test_a_pardon_lifts_the_quarantine_and_is_durable() -> None:
    bench = found_out()
    note = noted("pardon", bench.tell(Pardoned(B)))
    assert note.about == {"peer": B}
    assert (note.memory.quarantined, note.memory.pardoned) == ({}, {B: age(0, 3)})
    for each in (bench, bench.restarted(note.memory)):
        if each is not bench:
            each.start()
        assert each.tell(Announced(update(B, 4))) == [Fetch(update(B, 4))]
        each.tell(Fetched(update(B, 4)))
        assert each.barrier.standing(B, each.now) is Standing.DELIVERED


def test_who_is_not_quarantined_cannot_be_pardoned() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    assert bench.tell(Pardoned(B)) == []
    # and so has nothing to its credit
    assert only(Accuse, bench.tell(Accused(ONE, OTHER))) != []


@pytest.mark.parametrize(
    "old",
    [
        Accused(ONE, OTHER),
        Accused(OTHER, ONE),
        Accused(update(B, 1), update(B, 1, story="'")),
        Reported(C, (ONE,)),
        Reported(C, (OTHER,)),
        Announced(OTHER),
    ],
)
@pytest.mark.parametrize("restart", [False, True])
def test_old_evidence_does_not_bring_the_quarantine_back(old: Event, restart: bool) -> None:
    bench = found_out()
    note = noted("pardon", bench.tell(Pardoned(B)))
    if restart:
        bench = bench.restarted(note.memory)
        bench.start()
    assert only(Accuse, bench.tell(old)) == []
    assert bench.barrier.standing(B, bench.now) is not Standing.QUARANTINED


@pytest.mark.parametrize("generation", [0, 1])
def test_new_evidence_does(generation: int) -> None:
    bench = found_out()
    bench.tell(Pardoned(B))
    bench.tell(Announced(update(B, 4, generation)))
    [accuse] = only(Accuse, bench.tell(Announced(update(B, 4, generation, story="'"))))
    assert accuse.memory.quarantined == {B: age(generation, 4)}
    assert accuse.memory.pardoned == {B: age(0, 3)}
    bench.tell(Pardoned(B))
    assert only(Accuse, bench.tell(Accused(ONE, OTHER))) == []


def test_what_was_forgiven_is_not_used_either() -> None:
    """Or whoever is caught with a very late update, and pardoned, could lie freely below it."""
    bench = Bench(faulty_max=1).in_round(3)
    late = update(B, 10**9, generation=10**9)
    bench.tell(Accused(late, update(B, 10**9, generation=10**9, story="'")), Pardoned(B))
    for each in (ONE, OTHER, late):
        assert only(Fetch, bench.tell(Announced(each), Reported(C, (each,)))) == []
    assert bench.barrier.standing(B, bench.now) is Standing.AWAITED


def test_nor_is_what_was_here_or_on_its_way_before() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    bench.delivered(ONE)
    bench.tell(Accused(ONE, OTHER), Pardoned(B))
    assert bench.barrier.standing(B, bench.now) is not Standing.DELIVERED
    bench = Bench(faulty_max=1).in_round(3)
    bench.tell(Announced(ONE), Accused(ONE, OTHER), Pardoned(B))
    bench.tell(Announced(update(B, 4)))
    assert bench.tell(Fetched(ONE)) == [Fetch(update(B, 4))]
    assert bench.barrier.standing(B, bench.now) is Standing.AWAITED


def test_a_site_that_must_not_be_quarantined_is_not() -> None:
    """We do not quarantine ourselves, nor whoever merely passes evidence on."""
    bench = Bench(faulty_max=1).in_round(3)
    bench.tell(Reported(C, (ONE, OTHER)), Accused(update(US, 3), update(US, 3, story="'")))
    assert bench.barrier._view.quarantined.keys() == {B}


def test_evidence_counts_also_against_the_blocked() -> None:
    known = memory(3, announced=update(US, 3), blocked=frozenset({B}))
    bench = Bench(faulty_max=1)
    bench.barrier = Barrier(US, bench.terms, known)
    bench.start()
    [accuse] = only(Accuse, bench.tell(Announced(ONE), Announced(OTHER)))
    assert accuse.memory.blocked == accuse.memory.quarantined.keys() == {B}
