"""Echo mode: an update is merged only if a quorum of sites vouches for it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from lightyear_node.protocol.echo_votes import EchoVotes
from lightyear_node.protocol.events import (
    Accused,
    Announce,
    Announced,
    Blocked,
    Fetch,
    Fetched,
    Judge,
    Note,
    Reported,
    Tick,
)
from lightyear_node.protocol.parameters import (
    Cause,
    Parameters,
    Phase,
    default_faulty_max,
    default_min_peers,
)
from lightyear_node.types import PeerName, Reason, Update
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

ALL = tuple(update(peer, 3) for peer in (B, C, D))


def echoing(**parameters: Any) -> Bench:
    """Collecting in round 3; four sites, one may be faulty, so three votes are needed."""
    return Bench(**{"faulty_max": 1, "echo": True, **parameters}).in_round(3)


def of(judge: Judge) -> dict[PeerName, Reason | None]:
    """The reason for each peer that is not judged."""
    return {**{each.peer: None for each in judge.updates}, **dict(judge.missing)}


# The quorum.


@pytest.mark.parametrize("sites", range(4, 11))
def test_two_quorums_share_an_honest_site_and_honest_sites_reach_one(sites: int) -> None:
    for faulty_max in range((sites - 1) // 3 + 1):
        peers = frozenset(PeerName(f"site {number}") for number in range(sites - 1))
        min_peers = default_min_peers(sites, faulty_max)
        quorum = Parameters(peers, min_peers, faulty_max, rounds=9, echo=True).echo_quorum
        smallest_overlap = 2 * quorum - sites
        assert smallest_overlap > faulty_max
        assert quorum <= sites - faulty_max
        assert 2 * (quorum - 1) - sites <= faulty_max, "no larger than it must be"
    assert default_faulty_max(sites) == 1


def test_the_quorum_of_four_sites_in_all_combinations() -> None:
    """Any two groups that confirm an update share two sites."""
    quorum = Bench(faulty_max=1, echo=True).parameters.echo_quorum
    groups = [set(group) for group in itertools.combinations("abcd", quorum)]
    assert all(len(one & other) >= 2 for one in groups for other in groups)


# Which votes count.


def test_the_signer_and_this_site_are_not_enough() -> None:
    bench = echoing()
    bench.delivered(*ALL)
    assert bench.phase is Phase.COLLECTING
    assert bench.barrier.waiting_for(bench.now) == (
        "round 3: waiting for others to confirm what is here (3 of at least 2 updates here)"
    )


def test_one_more_vote_confirms_each_update() -> None:
    bench = echoing()
    bench.delivered(*ALL)
    assert only(Judge, bench.tell(Reported(C, (update(B, 3), update(D, 3))))) == []
    judge = judge_in(bench.tell(Reported(D, (update(C, 3),))))
    assert (judge.cause, judge.updates) == (Cause.ALL, ALL)


def test_without_echo_no_confirmation_is_needed() -> None:
    bench = echoing(echo=False)
    assert judge_in(bench.delivered(*ALL)).updates == ALL


@pytest.mark.parametrize(
    "report",
    [
        Reported(B, (update(B, 3),)),  # the signer, again
        Reported(US, (update(B, 3),)),  # we, again
        Reported(PeerName("x"), (update(B, 3),)),
        Reported(C, (update(B, 3, generation=1),)),  # another update
        Reported(C, ()),
    ],
)
def test_votes_that_do_not_count(report: Reported) -> None:
    bench = echoing()
    bench.delivered(*ALL)
    bench.tell(Reported(C, (update(D, 3),)), Reported(D, (update(C, 3),)))
    assert only(Judge, bench.tell(report, report)) == []
    judge = judge_in(bench.wait(31, alive=[B, C, D]))
    assert judge.updates == (update(C, 3), update(D, 3))


@pytest.mark.parametrize("before", [False, True])
def test_votes_of_quarantined_peers_never_count(before: bool) -> None:
    bench = echoing()
    bench.delivered(*ALL)
    report = Reported(C, (update(B, 3), update(D, 3)))
    lies = Accused(update(C, 1), update(C, 1, variant="'"))
    bench.tell(*((report, lies) if before else (lies, report)))
    judge = judge_in(bench.wait(15.5, alive=[B, D]))
    assert of(judge) == {B: Reason.UNCONFIRMED, C: Reason.QUARANTINED, D: Reason.UNCONFIRMED}


def test_votes_of_blocked_peers_count() -> None:
    """Blocking a site is not evidence that it is faulty."""
    bench = echoing(peers=(B, C, D, PeerName("e")))  # four must vouch
    bench.delivered(*ALL, update(PeerName("e"), 3))
    bench.tell(Blocked(frozenset({C})))
    bench.tell(Reported(C, (update(B, 3),)), Reported(D, (update(B, 3),)))
    assert of(judge_in(bench.wait(15.5, alive=[B, D])))[B] is None


def test_a_site_has_one_vote_per_round() -> None:
    first, second = update(B, 3), update(B, 3, generation=1)
    echo_votes = EchoVotes({B: (first,)})
    echo_votes.report(C, first)
    assert echo_votes.supporters(first, ()) == 3  # the signer, we and C
    echo_votes.report(C, second)
    assert echo_votes.supporters(first, ()) == 2  # the signer and we
    assert echo_votes.supporters(second, ()) == 2  # the signer and C


def test_the_window_stays_small_whatever_is_reported() -> None:
    bench = echoing(rounds=10**6)
    for number in range(3, 60):
        bench.tell(
            Reported(C, (update(B, number), update(D, number))), Announced(update(C, number))
        )
    assert {len(known) for known in bench.barrier.durable_state().vouched.values()} == {2}
    echo_votes = EchoVotes({})
    for number in range(3, 60):
        echo_votes.report(C, update(B, number))
        echo_votes.report(D, update(B, number))
    assert sorted(known.round for known in echo_votes.updates()) == [58, 58, 59, 59]


# Waiting for confirmation.


def test_a_round_waits_three_heartbeats_for_confirmation() -> None:
    bench = echoing()
    bench.delivered(*ALL)
    assert only(Judge, bench.wait(14.5, alive=[B, C, D])) == []
    judge = judge_in(bench.wait(0.5, alive=[B, C, D]))
    assert of(judge) == dict.fromkeys((B, C, D), Reason.UNCONFIRMED)
    # It still counts as delivered: one site cannot block the others.
    assert judge.cause is Cause.ALL


def test_a_confirmed_update_is_merged_although_another_is_unconfirmed() -> None:
    bench = echoing()
    bench.delivered(*ALL)
    bench.tell(Reported(C, (update(B, 3),)))
    judge = judge_in(bench.wait(15, alive=[B, C, D]))
    assert of(judge) == {B: None, C: Reason.UNCONFIRMED, D: Reason.UNCONFIRMED}


def test_a_confirmation_ends_the_wait() -> None:
    bench = echoing()
    bench.delivered(*ALL)
    bench.wait(5, alive=[B, C, D])
    bench.tell(Reported(C, (update(B, 3), update(D, 3))))
    assert of(judge_in(bench.tell(Reported(B, (update(C, 3),))))) == dict.fromkeys((B, C, D))


def test_a_round_does_not_wait_if_too_few_sites_can_confirm() -> None:
    bench = echoing(min_peers=2)
    bench.delivered(update(B, 3), update(C, 3))
    bench.wait(21, alive=[B])  # C and D fall silent
    assert bench.phase is Phase.JUDGING
    bench = echoing()
    bench.delivered(update(B, 3), update(C, 3))
    assert only(Judge, bench.wait(21, alive=[B, C])) == []  # only D does
    assert only(Judge, bench.wait(15, alive=[B, C])) != []


def test_an_overtaken_round_waits_for_confirmation_but_not_for_ever() -> None:
    bench = echoing()
    bench.tell(Announced(update(B, 5)), Announced(update(C, 5)))
    bench.tell(Fetched(update(B, 5)), Fetched(update(C, 5)))
    assert bench.phase is Phase.COLLECTING
    bench.tell(Reported(D, (update(B, 5),)))
    judge = judge_in(bench.wait(15, alive=[B, C, D]))
    assert (judge.cause, judge.updates) == (Cause.OVERTAKEN, (update(B, 5),))


def test_a_round_does_not_wait_to_confirm_a_peer_on_probation() -> None:
    bench = Bench(faulty_max=1, echo=True).in_round(3, generations={B: age(0, 0)})
    bench.delivered(update(B, 3, generation=1), update(C, 3), update(D, 3))
    bench.tell(Reported(B, (update(C, 3), update(D, 3))))
    assert of(judge_in(bench.all)) == {B: Reason.PROBATION, C: None, D: None}


def test_a_confirmed_newer_update_is_fetched_in_place_of_an_unconfirmed_one() -> None:
    bench = echoing()
    bench.delivered(update(B, 3))
    assert only(Fetch, bench.tell(Announced(update(B, 4)))) == []  # neither is confirmed
    commands = bench.tell(Reported(C, (update(B, 4),)))
    assert only(Fetch, commands) == [Fetch(update(B, 4))]
    bench.tell(Fetched(update(B, 4)))
    bench.delivered(update(C, 3), update(D, 3))
    assert of(judge_in(bench.wait(15, alive=[B, C, D])))[B] is None


def test_a_confirmed_update_is_not_replaced_by_a_newer_one() -> None:
    bench = echoing()
    bench.delivered(update(B, 3))
    bench.tell(Reported(C, (update(B, 3),)))
    assert only(Fetch, bench.tell(Announced(update(B, 4)), Reported(C, (update(B, 4),)))) == []


# Our own votes.


def vouched(bench: Bench) -> tuple[Update, ...]:
    return bench.barrier.durable_state().vouched.get(B, ())


def test_a_site_vouches_for_the_first_update_of_a_round_in_any_generation() -> None:
    bench = echoing()
    bench.tell(Announced(update(B, 3)), Announced(update(B, 3, generation=1)))
    assert vouched(bench) == (update(B, 3),)
    bench.tell(Announced(update(B, 4, generation=1)))
    assert vouched(bench) == (update(B, 4, generation=1), update(B, 3))


def test_a_site_never_vouches_for_an_earlier_round_than_its_last_vote() -> None:
    bench = echoing()
    for number in (3, 4, 5):
        bench.tell(Announced(update(B, number)))
    # Round 3 has left the window, but it is still old.
    bench.tell(Announced(update(B, 3, generation=1)), Announced(update(B, 4, generation=2)))
    assert vouched(bench) == (update(B, 5), update(B, 4))


def test_the_first_vote_counts_across_restarts() -> None:
    bench = echoing()
    bench.tell(Announced(update(B, 3)))
    durable = noted("witness", bench.wait(5)).memory
    assert durable.vouched[B] == (update(B, 3),)
    again = bench.restarted(durable)
    again.start()
    again.tell(Reported(C, (update(B, 3, generation=1),)))
    again.wait(10)
    assert vouched(again) == (update(B, 3),)


def test_a_vote_is_durable_before_it_is_reported() -> None:
    bench = echoing()
    bench.tell(*map(Announced, ALL))
    commands = [each for each in bench.wait(5) if isinstance(each, Note | Announce)]
    assert [type(each) for each in commands[:2]] == [Note, Announce]
    assert noted("witness", commands).memory.vouched == {each.peer: (each,) for each in ALL}


def test_a_vote_lost_in_a_crash_was_never_reported() -> None:
    """So the site may vouch for another update."""
    bench = echoing()
    known = memory(3, announced=update(US, 3))
    bench.tell(Announced(update(B, 3)))
    assert only(Announce, bench.all)[1:] == []
    again = bench.restarted(known)
    again.start()
    again.tell(Announced(update(B, 3, generation=1)))
    assert vouched(again) == (update(B, 3, generation=1),)


def test_another_record_makes_votes_durable_and_does_not_delay_the_report() -> None:
    bench = echoing()
    bench.tell(Announced(update(B, 3)))
    [note] = only(Note, bench.tell(Blocked(frozenset({D}))))
    assert note.memory.vouched == {B: (update(B, 3),)}
    assert len(only(Announce, bench.wait(1))) == 1  # it is still news, and so is report soon


def test_votes_are_reported_soon_and_together() -> None:
    bench = echoing()
    bench.wait(10, alive=[B, C, D])
    at: list[float] = []
    for each in ALL:
        for _ in range(2):
            bench.now += 0.1
            commands = bench.tell(Announced(each), Tick())
            at += [bench.now] * len(only(Announce, commands))
    for _ in range(12):
        bench.now += 0.1
        at += [bench.now] * len(only(Announce, bench.tell(Tick())))
    assert len(at) <= 2, "not one message for each"
    assert noted("witness", bench.all[-8:]).memory.vouched.keys() == {B, C, D}


def test_without_new_votes_nothing_is_recorded() -> None:
    bench = echoing()
    bench.tell(*map(Announced, ALL))
    bench.wait(5)
    for _ in range(20):
        bench.tell(*map(Announced, ALL), Reported(C, (update(B, 3), update(D, 3))))
        assert only(Note, bench.wait(5)) == []
