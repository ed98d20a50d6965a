"""Changing members and parameters while rounds run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightyear_node.errors import BarrierMisuse
from lightyear_node.protocol.events import (
    Accused,
    Announced,
    Answered,
    Blocked,
    Commit,
    Decide,
    Fetch,
    Fetched,
    FetchFailed,
    Heard,
    Judge,
    Judged,
    Merged,
    Reconfigured,
    Reported,
    Train,
)
from lightyear_node.protocol.parameters import Cause, Parameters, Phase, Standing
from lightyear_node.types import PeerName, Reason, Round, Update, Verdict
from tests.support.barrier_bench import (
    MODEL,
    B,
    Bench,
    C,
    D,
    E,
    age,
    judge_in,
    memory,
    noted,
    only,
    update,
)
from tests.support.barrier_phases import BUSY, brought_to, brought_to_the_end_of_the_round
from tests.support.object_state import tables_of


def of(bench: Bench, peers: tuple[PeerName, ...], **parameters: Any) -> Reconfigured:
    """`Reconfigured` with other members and parameters."""
    return Reconfigured(replace(bench.parameters, peers=frozenset(peers), **parameters))


WITHOUT_D = {"min_peers": 1, "faulty_max": 0}


# In every phase.


@pytest.mark.parametrize("phase", BUSY)
def test_a_site_can_be_added_in_every_phase(phase: Phase) -> None:
    bench = brought_to(phase)
    note = noted("members", bench.tell(of(bench, (B, C, D, E))))
    assert note.about == {"peers": [B, C, D, E]}
    assert bench.phase is phase
    bench.tell(Answered(E))
    brought_to_the_end_of_the_round(bench)
    assert (bench.phase, bench.barrier.round) == (Phase.TRAINING, 4)
    # In the next round it takes part.
    bench.tell(Announced(update(E, 3)))
    bench.sealed()
    assert bench.barrier.standing(E, bench.now) is Standing.AWAITED
    bench.delivered(*(update(peer, 4) for peer in (B, C, D)))
    assert update(E, 4) in judge_in(bench.delivered(update(E, 4))).updates


@pytest.mark.parametrize("phase", BUSY)
def test_a_site_can_be_removed_in_every_phase(phase: Phase) -> None:
    bench = brought_to(phase)
    bench.tell(of(bench, (B, C), **WITHOUT_D))
    brought_to_the_end_of_the_round(bench)
    assert (bench.phase, bench.barrier.round) == (Phase.TRAINING, 4)
    bench.sealed()
    assert only(Fetch, bench.tell(Announced(update(D, 4)), Heard(D))) == []
    judge = judge_in(bench.delivered(update(B, 4), update(C, 4)))
    assert judge.why == "all 2 peers delivered"


@pytest.mark.parametrize("phase", [Phase.PAUSED, Phase.FINISHED])
def test_members_change_also_when_no_round_runs(phase: Phase) -> None:
    paused = phase is Phase.PAUSED
    bench = Bench(faulty_max=1, rounds=9, remembers=memory(4 if paused else 9, paused=paused))
    bench.start()
    assert bench.phase is phase
    bench.tell(of(bench, (B, C, D, E)))
    assert bench.phase is phase
    assert bench.barrier.standing(E, bench.now) is Standing.AWAITED


def test_a_peer_removed_during_judging_is_not_merged() -> None:
    bench = brought_to(Phase.JUDGING)
    bench.tell(of(bench, (B, C), **WITHOUT_D))
    verdicts = tuple(Verdict(peer, True, Reason.OK, weight=0.3) for peer in (B, C, D))
    [decide] = only(Decide, bench.tell(Judged(Round(3), verdicts)))
    assert decide.decision.accepted == (update(B, 3), update(C, 3))
    [line] = [line for line in decide.decision.verdicts if line.peer == D]
    assert (line.accepted, line.reason, line.weight) == (False, Reason.BLOCKED, 0.0)


def test_a_decision_stands_although_a_peer_is_removed() -> None:
    bench = brought_to(Phase.MERGING)
    [decide] = only(Decide, bench.all)
    note = noted("members", bench.tell(of(bench, (B, C), **WITHOUT_D)))
    assert note.memory.decision == decide.decision
    [commit] = only(Commit, bench.tell(Merged(Round(3), MODEL)))
    assert commit.memory.used.keys() == {B, C, D}


def test_removing_the_last_awaited_peer_closes_the_round() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    bench.delivered(update(B, 3), update(C, 3))
    assert judge_in(bench.tell(of(bench, (B, C), **WITHOUT_D))).cause is Cause.ALL


def test_a_removed_site_need_not_answer_and_an_added_one_should() -> None:
    bench = Bench(faulty_max=1)
    bench.start(answering=False)
    bench.tell(Answered(B), Answered(D))
    commands = bench.tell(of(bench, (B, D), **WITHOUT_D))
    assert Train(Round(0)) in commands
    bench = Bench(faulty_max=1)
    bench.start(answering=False)
    bench.tell(of(bench, (B, C, D, E)))
    assert only(Train, bench.tell(*(Answered(peer) for peer in (B, C, D)))) == []
    assert Train(Round(0)) in bench.tell(Answered(E))


def test_the_answer_of_a_removed_site_does_not_count_for_recovery() -> None:
    bench = Bench(faulty_max=1, remembers=memory(recovering=True))
    bench.start(answering=False)
    bench.tell(Answered(D))
    bench.tell(of(bench, (B, C, E)), Answered(B))
    bench.wait(60)
    assert bench.phase is Phase.OBSERVING
    assert only(Train, bench.tell(Answered(C))) != []


@pytest.mark.parametrize("phase", BUSY)
def test_a_removed_peer_is_excluded_although_parameters_need_it(phase: Phase) -> None:
    bench = brought_to(phase)
    bench.tell(Reconfigured(bench.parameters, removed=frozenset({D})))
    assert bench.barrier.standing(D, bench.now) is Standing.BLOCKED
    commands = brought_to_the_end_of_the_round(bench)
    if phase is not Phase.MERGING:  # where it was decided before
        [decide] = only(Decide, commands)
        assert decide.decision.accepted == (update(B, 3), update(C, 3))
    bench.sealed()
    assert only(Fetch, bench.tell(Announced(update(D, 4)))) == []
    # It is included again when it is no longer listed as removed.
    assert Fetch(update(D, 4)) in bench.tell(Reconfigured(bench.parameters))


def test_without_removed_peers_a_round_waits() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    bench.delivered(update(B, 3))
    bench.tell(Reconfigured(bench.parameters, removed=frozenset({C, D})))
    assert only(Judge, bench.wait(600, alive=[B])) == []
    assert "too few sites are left" in bench.barrier.waiting_for(bench.now)


# What is dropped about a removed site, and what is kept.


def test_tables_drop_removed_sites() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    bench.delivered(update(D, 3))
    bench.tell(Reported(D, (update(B, 3),)), Reported(B, (update(D, 3),)))
    bench.tell(Announced(update(C, 3)))
    bench.tell(FetchFailed(update(C, 3), Reason.TIMEOUT, retriable=True))
    bench.tell(of(bench, (B,), **WITHOUT_D))
    durable = {"used", "vouched", "generations", "quarantined", "unquarantined", "blocked"}
    for part, name in tables_of(bench.barrier):
        if name not in durable:
            assert not {C, D} & sites_in(getattr(part, name)), name
    assert update(D, 3).digest not in bench.barrier.kept()


def sites_in(table: object) -> set[object]:
    """The sites that a table mentions: as keys, as values, or as signers of updates."""
    match table:
        case dict():
            return set(table).union(*map(sites_in, table.values()))
        case set() | frozenset() | list() | tuple():
            return set().union(*map(sites_in, table))
        case Update():
            return {table.peer}
    return {table} if isinstance(table, str) else set()


def test_a_running_download_from_a_removed_site_is_not_used() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    bench.tell(Announced(update(D, 3)))
    bench.tell(of(bench, (B, C), **WITHOUT_D), Fetched(update(D, 3)))
    assert bench.barrier.kept() == {bench.barrier.announced.digest}  # type: ignore[union-attr]


def test_durable_facts_about_removed_sites_are_kept() -> None:
    """A site that returns is still the same site."""
    bench = Bench(faulty_max=1, echo=True).in_round(
        3, generations=dict.fromkeys((B, C, D), age(0, 0)), used={C: age(0, 2)}
    )
    bench.tell(Announced(update(C, 3)), Announced(update(D, 3, generation=1)))
    bench.tell(Accused(update(B, 3), update(B, 3, variant="'")), Blocked(frozenset({D})))
    note = noted("members", bench.tell(of(bench, (E,), **WITHOUT_D)))
    again = bench.restarted(note.memory)
    again.start()
    for site in (bench, again):
        [back] = only(type(note), site.tell(of(bench, (B, C, D), min_peers=2, faulty_max=1)))
        known = back.memory
        assert known.quarantined == {B: age(0, 3)}
        assert known.blocked == {D}
        assert known.used == {C: age(0, 2)}
        assert known.generations[D] == age(1, 5)
        assert known.vouched[C] == (update(C, 3),)
        # The first vote of a round still counts.
        site.tell(Announced(update(C, 3, generation=1)))
        assert site.barrier.durable_state().vouched[C] == (update(C, 3),)


# Quorums and limits.


@pytest.mark.parametrize(
    ("peers", "min_peers", "faulty_max"),
    [((B, C), 2, 1), ((B, C, D), 3, 1), ((B, C, D), 1, 1), ((), 2, 1), ((PeerName("a"), B), 1, 0)],
)
@pytest.mark.parametrize("phase", BUSY)
def test_impossible_parameters_are_refused_without_change(
    phase: Phase, peers: tuple[PeerName, ...], min_peers: int, faulty_max: int
) -> None:
    bench = brought_to(phase)
    before = bench.state
    bench.now += 100
    with pytest.raises(BarrierMisuse):
        bench.tell(of(bench, peers, min_peers=min_peers, faulty_max=faulty_max))
    assert bench.state == before


def test_quorums_follow_the_new_members() -> None:
    bench = Bench(faulty_max=1, echo=True).in_round(3)
    assert (bench.barrier.parameters.echo_quorum, bench.barrier.parameters.honest_quorum) == (3, 2)
    seven = (B, C, D, E, PeerName("f"), PeerName("g"))
    bench.tell(of(bench, seven, min_peers=4, faulty_max=2))
    assert (bench.barrier.parameters.echo_quorum, bench.barrier.parameters.honest_quorum) == (5, 3)
    bench.delivered(*(update(peer, 3) for peer in seven[:3]))
    assert bench.phase is Phase.COLLECTING
    assert "3 of at least 4 updates here" in bench.barrier.waiting_for(bench.now)
    # Two peers beyond the round no longer close it; three do.
    for peer in seven[3:]:
        assert only(Judge, bench.wait(20, alive=seven)) == []
        ahead = update(peer, 9)
        bench.tell(Announced(ahead), FetchFailed(ahead, Reason.TIMEOUT, retriable=False))
    assert judge_in(bench.wait(20, alive=seven)).cause is Cause.OVERTAKEN


def test_an_update_confirmed_among_few_sites_is_unconfirmed_among_many() -> None:
    bench = Bench(faulty_max=1, echo=True).in_round(3)
    bench.delivered(update(B, 3), update(C, 3), update(D, 3))
    bench.tell(Reported(C, (update(B, 3),)))
    bench.tell(of(bench, (B, C, D, E), min_peers=3))
    bench.delivered(update(E, 3))
    judge = judge_in(bench.wait(16, alive=[B, C, D, E]))
    assert dict(judge.missing) == dict.fromkeys((B, C, D, E), Reason.UNCONFIRMED)


def test_lowering_min_peers_closes_the_round() -> None:
    bench = Bench(faulty_max=0, min_peers=3).in_round(3)
    bench.delivered(update(B, 3), update(C, 3))
    assert only(Judge, bench.wait(100, alive=[D])) == []
    bench.tell(of(bench, (B, C, D), min_peers=2))
    assert judge_in(bench.wait(30, alive=[D])).cause is Cause.GRACE


def test_new_timeouts_apply_at_once() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    bench.tell(of(bench, (B, C, D), grace_s=90.0, grace_min_s=90.0))
    bench.delivered(update(B, 3), update(C, 3))
    assert only(Judge, bench.wait(89, alive=[D])) == []
    assert judge_in(bench.wait(1, alive=[D])).cause is Cause.GRACE


def test_announcements_before_joining_do_not_count() -> None:
    """Announcements of sites that were not members yet are ignored."""
    bench = Bench(faulty_max=1)
    bench.start()
    bench.tell(Announced(update(E, 50)), Announced(update(PeerName("f"), 50)))
    bench.tell(of(bench, (B, C, D, E, PeerName("f"))))
    bench.sealed()
    assert bench.barrier.round == 0


def test_an_honest_quorum_has_at_most_all_peers() -> None:
    assert Parameters(frozenset(), 0, 0, 1).honest_quorum == 0
    assert Parameters(frozenset({B}), 1, 0, 1).honest_quorum == 1


def test_a_finished_site_continues_if_rounds_are_added() -> None:
    bench = Bench(rounds=1)
    bench.start()
    bench.sealed()
    judge = judge_in(bench.delivered(update(B, 0), update(C, 0), update(D, 0)))
    bench.finished_round(judge)
    assert bench.phase is Phase.FINISHED
    commands = bench.tell(Reconfigured(replace(bench.parameters, rounds=2)))
    assert bench.phase is Phase.TRAINING
    assert only(Train, commands) == [Train(Round(1))]
