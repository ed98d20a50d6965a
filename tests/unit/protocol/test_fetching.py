"""Which updates the barrier fetches, and blocked peers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightyear_node.protocol.events import (
    Announced,
    Blocked,
    Decide,
    Event,
    Fetch,
    Fetched,
    FetchFailed,
    Judge,
    Judged,
    Merge,
)
from lightyear_node.protocol.parameters import Cause, Standing
from lightyear_node.types import Digest, Reason, Verdict
from tests.support.barrier_bench import B, Bench, C, D, judge_in, only, update

# Fetching.


def test_a_repeated_announcement_is_fetched_once() -> None:
    bench = Bench().in_round(2)
    wanted = update(B, 2)
    assert bench.tell(Announced(wanted), Announced(wanted)) == [Fetch(wanted)]
    bench.tell(Fetched(wanted))
    assert only(Fetch, bench.tell(Announced(wanted))) == []


def test_an_older_round_is_not_fetched() -> None:
    bench = Bench().in_round(2)
    assert bench.tell(Announced(update(B, 1))) == []


def test_updates_are_fetched_while_we_train() -> None:
    bench = Bench()
    bench.start()
    assert bench.tell(Announced(update(B, 0))) == [Fetch(update(B, 0))]
    bench.tell(Fetched(update(B, 0)))
    # One update per peer and round is enough; a newer one is fetched if our tag is higher.
    assert bench.tell(Announced(update(B, 1)), Announced(update(C, 1))) == [Fetch(update(C, 1))]
    assert Fetch(update(B, 1)) in bench.sealed()


def test_the_newest_update_is_fetched_after_the_running_fetch() -> None:
    bench = Bench()
    bench.start()
    bench.tell(Announced(update(B, 0)))
    assert bench.tell(Announced(update(B, 4)), Announced(update(C, 4))) == [Fetch(update(C, 4))]
    bench.sealed()
    assert bench.barrier.round == 4
    assert bench.tell(Fetched(update(B, 0))) == [Fetch(update(B, 4))]


def test_a_failed_fetch_is_retried_at_the_next_heartbeat() -> None:
    bench = Bench().in_round(0)
    bench.tell(Announced(update(B, 0)))
    bench.wait(2)  # in which it tells the others of the announcement
    assert bench.tell(FetchFailed(update(B, 0), Reason.TIMEOUT, retriable=True)) == []
    assert bench.wait(3.5) == []
    assert only(Fetch, bench.wait(0.5)) == [Fetch(update(B, 0))]


def test_a_newer_announcement_is_fetched_at_once_after_a_failure() -> None:
    bench = Bench().in_round(0)
    bench.tell(Announced(update(B, 0)), Announced(update(C, 0)))
    bench.tell(FetchFailed(update(B, 0), Reason.CHECKSUM, retriable=False))
    bench.tell(Fetched(update(C, 0)))
    assert Fetch(update(B, 0, generation=1)) in bench.tell(Announced(update(B, 0, generation=1)))


def test_an_invalid_update_is_neither_retried_nor_waited_for() -> None:
    bench = Bench().in_round(0)
    bench.tell(Announced(update(B, 0)))
    bench.tell(FetchFailed(update(B, 0), Reason.SCHEMA_MISMATCH, retriable=False))
    assert only(Fetch, bench.wait(30, alive=[B, C, D])) == []
    assert bench.barrier.standing(B, bench.now) is Standing.REFUSED
    judge = judge_in(bench.delivered(update(C, 0), update(D, 0)))
    assert judge.cause is Cause.ALL
    assert judge.missing == ((B, Reason.SCHEMA_MISMATCH),)


def test_after_an_invalid_update_the_next_one_is_waited_for() -> None:
    bench = Bench().in_round(0)
    bench.tell(Announced(update(B, 0)))
    bench.tell(FetchFailed(update(B, 0), Reason.CHECKSUM, retriable=False))
    bench.finished_round(judge_in(bench.delivered(update(C, 0), update(D, 0))))
    bench.sealed()
    assert only(Judge, bench.delivered(update(C, 1), update(D, 1))) == []
    assert bench.barrier.standing(B, bench.now) is Standing.AWAITED
    assert judge_in(bench.delivered(update(B, 1))).missing == ()


def test_an_update_that_was_not_requested_is_ignored() -> None:
    bench = Bench(min_peers=1).in_round(0)
    bench.tell(Announced(update(B, 0)))
    before = bench.state
    other = replace(update(B, 0), digest=Digest("other"))
    bench.tell(Fetched(other), FetchFailed(other, Reason.CHECKSUM, retriable=False))
    assert bench.state == before


def test_a_new_generation_voids_the_updates_of_the_old_one() -> None:
    bench = Bench().in_round(0)
    bench.delivered(update(B, 0))
    bench.tell(Announced(update(C, 0)))
    bench.tell(Announced(update(B, 0, generation=1)), Announced(update(C, 0, generation=1)))
    bench.tell(Fetched(update(C, 0)))  # was on its way
    assert bench.barrier.standing(B, bench.now) is Standing.AWAITED
    assert bench.barrier.standing(C, bench.now) is Standing.AWAITED
    assert bench.tell(Announced(update(B, 7, generation=0))) == []  # an old one is not newer


@pytest.mark.parametrize("event", [Announced(update(B, 1)), Fetched(update(B, 0))])
def test_every_message_of_a_peer_is_a_sign_of_life(event: Event) -> None:
    bench = Bench()
    bench.start()
    bench.tell(Announced(update(B, 0)), Announced(update(C, 2)))
    bench.sealed()
    bench.wait(19)
    bench.tell(event)
    bench.wait(19)
    assert bench.barrier.round == 2
    assert bench.barrier.standing(B, bench.now) is Standing.AWAITED
    assert bench.barrier.standing(D, bench.now) is Standing.SILENT


# Blocking.


def test_blocked_peers_are_neither_fetched_nor_counted_nor_waited_for() -> None:
    bench = Bench(min_peers=1).in_round(0)
    bench.delivered(update(B, 0))
    bench.tell(Announced(update(C, 0)))
    bench.tell(Blocked(frozenset({B, C})))
    bench.tell(Fetched(update(C, 0)))  # was on its way
    assert only(Fetch, bench.wait(10, alive=[D])) == []
    judge = judge_in(bench.delivered(update(D, 0)))
    assert (judge.cause, judge.updates) == (Cause.ALL, (update(D, 0),))
    assert judge.missing == ((B, Reason.BLOCKED), (C, Reason.BLOCKED))


def test_blocking_the_last_awaited_peer_closes_the_round() -> None:
    bench = Bench().in_round(0)
    bench.delivered(update(B, 0), update(C, 0))
    assert judge_in(bench.tell(Blocked(frozenset({D})))).cause is Cause.ALL


def test_a_peer_blocked_during_judging_is_not_merged() -> None:
    bench = Bench(peers=(B, C), min_peers=1).in_round(0)
    judge = judge_in(bench.delivered(update(B, 0), update(C, 0)))
    bench.tell(Blocked(frozenset({C})))
    verdicts = tuple(Verdict(peer, True, Reason.OK, weight=0.5) for peer in (B, C))
    [decide] = only(Decide, bench.tell(Judged(judge.round, verdicts)))
    assert decide.decision.accepted == (update(B, 0),)
    assert [(line.reason, line.weight) for line in decide.decision.verdicts] == [
        (Reason.OK, 0.5),
        (Reason.BLOCKED, 0.0),
    ]


def test_a_decision_stands_although_its_peers_are_blocked_later() -> None:
    bench = Bench(peers=(B, C), min_peers=1).in_round(0)
    judge = judge_in(bench.delivered(update(B, 0), update(C, 0)))
    [decide] = only(Decide, bench.judged(judge))
    again = Bench(peers=(B, C), min_peers=1, remembers=decide.memory, blocked=[B, C])
    assert Merge(decide.decision) in again.start()
