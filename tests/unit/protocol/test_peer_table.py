"""What a site knows about its peers: what is kept, for how long, and what follows from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightyear_node.protocol import echo_votes
from lightyear_node.protocol.events import (
    Accuse,
    Accused,
    Announced,
    Answered,
    Blocked,
    Fetch,
    Fetched,
    FetchFailed,
    Heard,
    Judge,
    Note,
    Reconfigured,
    Reported,
    Unquarantined,
)
from lightyear_node.protocol.parameters import (
    Cause,
    Parameters,
    Phase,
    Standing,
    admissible_min_peers,
)
from lightyear_node.protocol.peer_table import PeerTable
from lightyear_node.protocol.state_machine import Barrier
from lightyear_node.types import PeerName, Reason, Round, Update
from tests.support.barrier_bench import US, B, Bench, C, D, E, judge_in, memory, noted, only, update

# Names in journals, messages and settings.


def test_phases_causes_and_standings_have_the_names_used_in_journals_and_messages() -> None:
    assert " ".join(Phase) == (
        "observing paused training sealing collecting judging merging finished"
    )
    assert " ".join(Cause) == "all grace overtaken"
    assert " ".join(Standing) == (
        "delivered awaited lagging silent refused paused blocked quarantined"
    )


def test_parameters_have_these_defaults() -> None:
    assert Parameters(frozenset({B}), 1, 0, 9) == Parameters(
        frozenset({B}),
        min_peers=1,
        faulty_max=0,
        rounds=9,
        grace_s=30.0,
        grace_min_s=30.0,
        deadline_s=0.0,
        heartbeat_s=5.0,
        suspect_s=20.0,
        observe_s=5.0,
        degraded_s=60.0,
        lag_rounds=3,
        stall_s=120.0,
        probation_rounds=2,
        echo=False,
    )
    assert Heard(B) == Heard(B, "", 0)
    assert Announced(update(B, 0)) == Announced(update(B, 0), "", 0)


@pytest.mark.parametrize("faulty_max", range(4))
def test_fewer_than_three_sites_per_faulty_one_plus_one_are_too_few(faulty_max: int) -> None:
    sites = 3 * faulty_max + 1
    assert not admissible_min_peers(sites - 1, faulty_max)
    assert not admissible_min_peers(sites, -1)
    if faulty_max:
        assert list(admissible_min_peers(sites, faulty_max)) == [2 * faulty_max]


# Echo votes.


def test_an_old_report_does_not_push_out_the_newest_two() -> None:
    known = echo_votes.EchoVotes({})
    for number in (5, 6, 3):
        known.report(C, update(B, number))
    confirmed = [known.supporters(update(B, number), ()) for number in (3, 5, 6)]
    assert confirmed == [1, 2, 2]


# Members.


def test_after_new_parameters_peers_are_judged_in_order() -> None:
    peers = [PeerName(f"site {number}") for number in range(10)]
    bench = Bench(peers=(B, C)).in_round(3)
    bench.tell(Reconfigured(replace(bench.parameters, peers=frozenset(peers))))
    judge = judge_in(bench.delivered(*(update(peer, 3) for peer in reversed(peers))))
    assert [each.peer for each in judge.updates] == peers


def test_a_peer_that_returns_is_waited_for_like_a_new_one() -> None:
    bench = Bench().in_round(3)
    bench.delivered(update(B, 3), update(C, 3))
    bench.finished_round(judge_in(bench.wait(31, alive=[D])))
    assert bench.barrier.standing(D, bench.now) is Standing.LAGGING
    all_members = bench.parameters
    bench.tell(
        Reconfigured(replace(all_members, peers=frozenset({B, C}))), Reconfigured(all_members)
    )
    assert bench.barrier.standing(D, bench.now) is Standing.AWAITED


def test_the_records_of_a_removed_peer_are_no_longer_counted() -> None:
    bench = Bench().in_round(3)
    for number in range(3, 40):
        bench.tell(Announced(update(D, number)))
    assert bench.barrier.withheld[D]
    bench.tell(Reconfigured(replace(bench.parameters, peers=frozenset({B, C}))))
    assert D not in bench.barrier.withheld


# Extensions.


def table_with_working_d(**parameters: float) -> PeerTable:
    """A table at time 0, in which D is alive and working."""
    known = Parameters(frozenset({B, C, D}), 2, 0, 1000, deadline_s=300.0, **parameters)  # type: ignore[arg-type]
    table = PeerTable(known, memory(), provable=lambda update: True)
    table.mark_alive(D, 0.0)
    table.note_activity(D, Phase.TRAINING, 1, 0.0)
    return table


def accepted_until_patient(table: PeerTable, most: int) -> int:
    for number in range(most):
        if table.progressing(Round(0), 0.0) == [D]:
            return number
        table.settle_extensions(set(), {D})
    return most


@pytest.mark.parametrize(
    ("failures", "owed"), [(0, 0), (1, 1), (2, 2), (3, 4), (11, 1024), (15, 1024)]
)
def test_every_wasted_extension_doubles_what_a_peer_owes_up_to_a_limit(
    failures: int, owed: int
) -> None:
    table = table_with_working_d()
    for _ in range(failures):
        table.settle_extensions({D}, set())
    assert accepted_until_patient(table, 5000) == owed


def test_more_accepted_updates_than_owed_do_no_harm() -> None:
    table = table_with_working_d()
    table.settle_extensions({D}, set())
    for _ in range(3):
        table.settle_extensions(set(), {D})
    assert table.progressing(Round(0), 0.0) == [D]


def test_a_working_peer_without_an_announcement_is_waited_for() -> None:
    bench = Bench(deadline_s=300.0).in_round(3)
    bench.delivered(update(B, 3), update(C, 3))
    assert only(Judge, bench.wait(100, working=[D])) == []


def test_a_peer_that_never_reported_progress_gets_only_the_grace() -> None:
    bench = Bench(deadline_s=300.0, suspect_s=1000.0).in_round(3)
    bench.delivered(update(B, 3), update(C, 3))
    assert bench.barrier.standing(D, bench.now) is Standing.AWAITED
    assert judge_in(bench.wait(30)).cause is Cause.GRACE


def test_progress_may_pause_for_the_stall_time_and_no_longer() -> None:
    table = table_with_working_d(suspect_s=1000.0, stall_s=120.0)
    assert table.progressing(Round(0), 120.0) == [D]
    assert table.progressing(Round(0), 120.5) == []


def test_a_peer_known_only_from_reports_is_silent_after_one_grace() -> None:
    bench = Bench().in_round(3)
    bench.barrier = Barrier(US, bench.parameters, memory(3, announced=update(US, 3)))
    bench.start(answering=False)
    bench.tell(Answered(B), Answered(C), Reported(B, (update(D, 2),)))
    bench.wait(5, alive=[B, C])
    bench.delivered(update(B, 3), update(C, 3))
    assert bench.barrier.standing(D, bench.now) is Standing.AWAITED
    bench.finished_round(judge_in(bench.wait(31, alive=[B, C])))
    assert bench.barrier.standing(D, bench.now) is Standing.SILENT


# Evidence, generations and unquarantine.


def test_reports_do_not_include_quarantined_peers() -> None:
    bench = Bench().in_round(3)
    bench.tell(Accused(update(B, 2), update(B, 2, variant="'")))
    bench.tell(Announced(update(B, 3)))
    assert only(Note, bench.wait(10)) == []
    assert bench.barrier.durable_state().vouched == {}


def test_both_updates_of_evidence_must_be_provable() -> None:
    updates = update(B, 3), update(B, 3, variant="'")
    for unknown in updates:
        barrier = Barrier(
            US, Bench().parameters, memory(3), provable=lambda each, un=unknown: each != un
        )
        barrier.start(0.0, 0)
        assert only(Accuse, barrier.handle(Accused(*updates), 0.0)) == []


@pytest.mark.parametrize(("round", "void"), [(400, False), (399, True)])
def test_evidence_older_than_100_rounds_is_ignored(round: int, void: bool) -> None:
    bench = Bench().in_round(500)
    commands = bench.tell(Accused(update(B, round), update(B, round, variant="'")))
    assert (only(Accuse, commands) == []) is void


def test_updates_announced_before_an_unquarantine_are_not_fetched() -> None:
    bench = Bench(peers=(B, C, D, E)).in_round(3)
    bench.tell(Blocked(frozenset({B})), Announced(update(B, 3)))
    bench.tell(Accused(update(B, 3), update(B, 3, variant="'")))
    commands = bench.tell(Unquarantined(B), Blocked(frozenset()))
    assert only(Fetch, commands) == []
    assert bench.barrier.standing(B, bench.now) is Standing.AWAITED


def fetching(*updates: Update) -> PeerTable:
    table = table_with_working_d()
    for each in updates:
        table.learn(each, Round(0), 0.0)
    assert table.fetch(Round(0), 0.0) == [updates[-1]]
    return table


def test_a_download_of_an_earlier_generation_is_not_used() -> None:
    table = fetching(update(B, 3))
    table.learn(update(B, 4, generation=1), Round(0), 0.0)
    assert not table.receive(update(B, 3), 0.0)
    assert not table.has_delivered(B, Round(0))


@pytest.mark.parametrize("later", [False, True])
def test_a_download_that_ends_after_an_unquarantine_is_not_used(later: bool) -> None:
    table = fetching(update(B, 3))
    assert table.quarantine(update(B, 3), update(B, 3, variant="'"), Round(0))
    assert table.unquarantine(B)
    if later:
        table.learn(update(B, 4), Round(0), 0.0)
    assert not table.receive(update(B, 3), 0.0)
    assert not table.has_delivered(B, Round(0))


def test_a_new_generation_is_recorded_also_with_a_known_round() -> None:
    bench = Bench().in_round(3)
    bench.tell(Announced(update(B, 5)))
    bench.wait(5)
    note = noted("witness", bench.tell(Announced(update(B, 4, generation=1))))
    assert note.memory.generations[B] == (1, 6)
    assert note.memory.vouched[B] == (update(B, 5),)


def test_generations_beyond_the_quota_are_ignored() -> None:
    bench = Bench().in_round(3)
    for number in range(40):
        bench.tell(Announced(update(B, 3, generation=number)))
    followed = bench.barrier.durable_state().generations[B][0]
    assert followed < 39
    [fetched, *_] = only(Fetch, bench.tell(FetchFailed(update(B, 3), Reason.TIMEOUT, True)))
    assert fetched.update.generation == followed


def test_an_update_beyond_the_quota_gets_a_vote_when_it_is_repeated_later() -> None:
    bench = Bench().in_round(3)
    for number in range(3, 40):
        bench.tell(Announced(update(B, number)))
    assert bench.barrier.durable_state().vouched[B][0] != update(B, 39)
    bench.wait(120)
    bench.tell(Announced(update(B, 39)))
    assert bench.barrier.durable_state().vouched[B][0] == update(B, 39)


# Confirming.


def test_quarantined_peers_are_not_expected_to_confirm() -> None:
    peers = tuple(PeerName(name) for name in "bcdefg")
    bench = Bench(peers=peers, faulty_max=1, echo=True).in_round(3)
    bench.tell(Blocked(frozenset({peers[5]})))
    for faulty in peers[2:5]:
        bench.tell(Accused(update(faulty, 2), update(faulty, 2, variant="'")), Heard(faulty))
    judge = judge_in(bench.delivered(update(B, 3), update(C, 3)))
    assert dict(judge.missing)[B] is Reason.UNCONFIRMED


def test_unknown_peers_are_not_expected_to_confirm() -> None:
    bench = Bench(faulty_max=1, echo=True)
    bench.barrier = Barrier(US, bench.parameters, memory(3, announced=update(US, 3)))
    bench.start(answering=False)
    bench.tell(Answered(B), Answered(C), Blocked(frozenset({D})))
    bench.wait(5, alive=[B, C])
    assert only(Judge, bench.delivered(update(B, 3), update(C, 3))) == []
    assert judge_in(bench.wait(15, alive=[B, C])).cause is Cause.ALL


# What the stores must keep.


def test_a_partial_update_is_kept_while_it_can_be_used() -> None:
    bench = Bench().in_round(3)
    for peer, retriable in ((B, True), (C, False)):
        bench.tell(Announced(update(peer, 3)))
        bench.tell(FetchFailed(update(peer, 3), Reason.TIMEOUT, retriable))
    assert bench.barrier.kept() == {update(US, 3).digest, update(B, 3).digest}
    bench.delivered(update(B, 4), update(C, 4), update(D, 4))
    bench.finished_round(judge_in(bench.all))
    assert bench.barrier.round == 4
    assert update(B, 3).digest not in bench.barrier.kept()


def test_the_manifest_of_a_failed_download_is_kept() -> None:
    bench = Bench().in_round(3)
    bench.tell(Announced(update(B, 3)))
    bench.tell(FetchFailed(update(B, 3), Reason.TIMEOUT, True))
    for number in (4, 5, 6):
        bench.tell(Announced(update(B, number)), Fetched(update(B, number)))
    assert update(B, 3) in bench.barrier.referenced()
