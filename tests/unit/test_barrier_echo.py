"""Echo mode: an update is merged when so many sites vouch for it that no other can find as many."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from lightyear_node.barrier import (
    Accused,
    Announce,
    Announced,
    Blocked,
    Cause,
    Fetch,
    Fetched,
    Judge,
    Note,
    Phase,
    Reported,
    Terms,
    Tick,
    default_faulty_max,
    default_min_peers,
)
from lightyear_node.records import PeerName, Reason, Update
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

ALL = tuple(update(peer, 3) for peer in (B, C, D))


def echoing(**terms: Any) -> Bench:
    """Collecting in round 3, four sites of which one may lie: three must vouch."""
    return Bench(**{"faulty_max": 1, "echo": True, **terms}).in_round(3)


def of(judge: Judge) -> dict[PeerName, Reason | None]:
    """What becomes of each peer."""
    return {**{each.peer: None for each in judge.updates}, **dict(judge.missing)}


# The quorum.


@pytest.mark.parametrize("sites", range(4, 11))
def test_two_quorums_share_an_honest_site_and_one_can_be_had(sites: int) -> None:
    for faulty_max in range((sites - 1) // 3 + 1):
        peers = frozenset(PeerName(f"site {number}") for number in range(sites - 1))
        min_peers = default_min_peers(sites, faulty_max)
        quorum = Terms(peers, min_peers, faulty_max, rounds=9, echo=True).echo_quorum
        smallest_overlap = 2 * quorum - sites
        assert smallest_overlap > faulty_max
        assert quorum <= sites - faulty_max
        assert 2 * (quorum - 1) - sites <= faulty_max, "no larger than it must be"
    assert default_faulty_max(sites) == 1


def test_the_quorum_of_four_sites_in_all_combinations() -> None:
    """Of all pairs of groups that could confirm two updates, each shares two sites."""
    quorum = Bench(faulty_max=1, echo=True).terms.echo_quorum
    groups = [set(group) for group in itertools.combinations("abcd", quorum)]
    assert all(len(one & other) >= 2 for one in groups for other in groups)


# Who counts.


def test_the_signer_and_we_are_not_enough() -> None:
    bench = echoing()
    bench.delivered(*ALL)
    assert bench.phase is Phase.COLLECTING
    assert bench.barrier.waiting_for(bench.now) == (
        "round 3: waiting for others to confirm what is here (3 of at least 2 updates here)"
    )


def test_one_more_site_confirms_each_update() -> None:
    bench = echoing()
    bench.delivered(*ALL)
    assert only(Judge, bench.tell(Reported(C, (update(B, 3), update(D, 3))))) == []
    judge = judge_in(bench.tell(Reported(D, (update(C, 3),))))
    assert (judge.cause, judge.updates) == (Cause.ALL, ALL)


def test_without_echo_nobody_needs_to_confirm() -> None:
    bench = echoing(echo=False)
    assert judge_in(bench.delivered(*ALL)).updates == ALL


@pytest.mark.parametrize(
    "told",
    [
        Reported(B, (update(B, 3),)),  # the signer, again
        Reported(US, (update(B, 3),)),  # we, again
        Reported(PeerName("x"), (update(B, 3),)),
        Reported(C, (update(B, 3, generation=1),)),  # another update
        Reported(C, ()),
    ],
)
def test_who_does_not_count(told: Reported) -> None:
    bench = echoing()
    bench.delivered(*ALL)
    bench.tell(Reported(C, (update(D, 3),)), Reported(D, (update(C, 3),)))
    assert only(Judge, bench.tell(told, told)) == []
    assert bench.barrier._view.testimony.supporters(update(B, 3), ()) == 2


@pytest.mark.parametrize("before", [False, True])
def test_the_quarantined_do_not_count_whenever_they_have_told_us(before: bool) -> None:
    bench = echoing()
    bench.delivered(*ALL)
    story = Reported(C, (update(B, 3), update(D, 3)))
    lies = Accused(update(C, 1), update(C, 1, story="'"))
    bench.tell(*((story, lies) if before else (lies, story)))
    judge = judge_in(bench.wait(15.5, alive=[B, D]))
    assert of(judge) == {B: Reason.UNCONFIRMED, C: Reason.QUARANTINED, D: Reason.UNCONFIRMED}


def test_the_blocked_still_count() -> None:
    """An operator's opinion of a site is no evidence that it lies."""
    bench = echoing(peers=(B, C, D, PeerName("e")))  # four must vouch
    bench.delivered(*ALL, update(PeerName("e"), 3))
    bench.tell(Blocked(frozenset({C})))
    bench.tell(Reported(C, (update(B, 3),)), Reported(D, (update(B, 3),)))
    assert of(judge_in(bench.wait(15.5, alive=[B, D])))[B] is None


def test_a_site_counts_for_one_update_of_a_round() -> None:
    bench = echoing(peers=tuple(PeerName(name) for name in "bcdefg"), min_peers=3)
    first, second = update(B, 3), update(B, 3, generation=1)
    bench.tell(Reported(C, (first,)), Reported(C, (second,)))
    testimony = bench.barrier._view.testimony
    assert testimony.supporters(first, ()) == 2  # the signer and we
    assert testimony.supporters(second, ()) == 2  # the signer and C


def test_the_window_is_small_whatever_is_told() -> None:
    bench = echoing(rounds=10**6)
    for number in range(3, 60):
        bench.tell(
            Reported(C, (update(B, number), update(D, number))), Announced(update(C, number))
        )
    testimony = bench.barrier._view.testimony
    assert {len(known) for known in testimony.vouched.values()} == {2}
    told = [known for reports in testimony._reports.values() for known in reports.values()]
    assert {len(known) for known in told} == {2}


# Waiting for confirmation.


def test_confirmation_is_waited_for_three_heartbeats_and_no_longer() -> None:
    bench = echoing()
    bench.delivered(*ALL)
    assert only(Judge, bench.wait(14.5, alive=[B, C, D])) == []
    judge = judge_in(bench.wait(0.5, alive=[B, C, D]))
    assert of(judge) == dict.fromkeys((B, C, D), Reason.UNCONFIRMED)
    # It counts for the barrier all the same: one site cannot hold the others up.
    assert judge.cause is Cause.ALL


def test_what_is_confirmed_is_merged_although_another_is_not() -> None:
    bench = echoing()
    bench.delivered(*ALL)
    bench.tell(Reported(C, (update(B, 3),)))
    judge = judge_in(bench.wait(15, alive=[B, C, D]))
    assert of(judge) == {B: None, C: Reason.UNCONFIRMED, D: Reason.UNCONFIRMED}


def test_a_confirmation_that_comes_ends_the_waiting() -> None:
    bench = echoing()
    bench.delivered(*ALL)
    bench.wait(5, alive=[B, C, D])
    bench.tell(Reported(C, (update(B, 3), update(D, 3))))
    assert of(judge_in(bench.tell(Reported(B, (update(C, 3),))))) == dict.fromkeys((B, C, D))


def test_there_is_no_waiting_where_too_few_are_left_to_confirm() -> None:
    bench = echoing(min_peers=2)
    bench.delivered(update(B, 3), update(C, 3))
    bench.wait(21, alive=[B])  # C and D fall silent
    assert bench.phase is Phase.JUDGING
    bench = echoing()
    bench.delivered(update(B, 3), update(C, 3))
    assert only(Judge, bench.wait(21, alive=[B, C])) == []  # only D does
    assert only(Judge, bench.wait(15, alive=[B, C])) != []


def test_the_overtaken_wait_for_confirmation_too_but_not_for_ever() -> None:
    bench = echoing()
    bench.tell(Announced(update(B, 5)), Announced(update(C, 5)))
    bench.tell(Fetched(update(B, 5)), Fetched(update(C, 5)))
    assert bench.phase is Phase.COLLECTING
    bench.tell(Reported(D, (update(B, 5),)))
    judge = judge_in(bench.wait(15, alive=[B, C, D]))
    assert (judge.cause, judge.updates) == (Cause.OVERTAKEN, (update(B, 5),))


def test_nobody_is_waited_for_who_is_on_probation_anyway() -> None:
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


def test_a_confirmed_update_is_not_given_up_for_a_newer_one() -> None:
    bench = echoing()
    bench.delivered(update(B, 3))
    bench.tell(Reported(C, (update(B, 3),)))
    assert only(Fetch, bench.tell(Announced(update(B, 4)), Reported(C, (update(B, 4),)))) == []


# What we vouch for.


def vouched(bench: Bench) -> tuple[Update, ...]:
    return bench.barrier._view.testimony.vouched.get(B, ())


def test_we_vouch_for_the_first_update_of_a_round_in_whatever_generation() -> None:
    bench = echoing()
    bench.tell(Announced(update(B, 3)), Announced(update(B, 3, generation=1)))
    assert vouched(bench) == (update(B, 3),)
    bench.tell(Announced(update(B, 4, generation=1)))
    assert vouched(bench) == (update(B, 4, generation=1), update(B, 3))


def test_we_never_vouch_for_a_round_before_our_last() -> None:
    bench = echoing()
    for number in (3, 4, 5):
        bench.tell(Announced(update(B, number)))
    # Round 3 has left the window; that does not make it new.
    bench.tell(Announced(update(B, 3, generation=1)), Announced(update(B, 4, generation=2)))
    assert vouched(bench) == (update(B, 5), update(B, 4))


def test_the_first_is_the_first_across_restarts() -> None:
    bench = echoing()
    bench.tell(Announced(update(B, 3)))
    durable = noted("witness", bench.wait(5)).memory
    assert durable.vouched[B] == (update(B, 3),)
    again = bench.restarted(durable)
    again.start()
    again.tell(Reported(C, (update(B, 3, generation=1),)))
    again.wait(10)
    assert vouched(again) == (update(B, 3),)


def test_what_we_vouch_for_is_durable_before_anybody_is_told() -> None:
    bench = echoing()
    bench.tell(*map(Announced, ALL))
    commands = [each for each in bench.wait(5) if isinstance(each, Note | Announce)]
    assert [type(each) for each in commands[:2]] == [Note, Announce]
    assert noted("witness", commands).memory.vouched == {each.peer: (each,) for each in ALL}


def test_after_a_crash_before_that_nobody_was_told() -> None:
    """So the site may as well vouch for another."""
    bench = echoing()
    known = memory(3, announced=update(US, 3))
    bench.tell(Announced(update(B, 3)))
    assert only(Announce, bench.all)[1:] == []
    again = bench.restarted(known)
    again.start()
    again.tell(Announced(update(B, 3, generation=1)))
    assert vouched(again) == (update(B, 3, generation=1),)


def test_another_record_makes_it_durable_and_does_not_delay_the_news() -> None:
    bench = echoing()
    bench.tell(Announced(update(B, 3)))
    [note] = only(Note, bench.tell(Blocked(frozenset({D}))))
    assert note.memory.vouched == {B: (update(B, 3),)}
    assert len(only(Announce, bench.wait(1))) == 1  # it is still news, and so is told soon


def test_news_go_out_soon_and_together() -> None:
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


def test_without_news_nothing_is_written() -> None:
    bench = echoing()
    bench.tell(*map(Announced, ALL))
    bench.wait(5)
    for _ in range(20):
        bench.tell(*map(Announced, ALL), Reported(C, (update(B, 3), update(D, 3))))
        assert only(Note, bench.wait(5)) == []
