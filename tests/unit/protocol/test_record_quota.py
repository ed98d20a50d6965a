"""The token bucket of journal records per peer."""

from __future__ import annotations

import pytest

from lightyear_node.protocol.record_quota import RecordQuota
from tests.support.barrier_bench import B, C


def taken(quota: RecordQuota, now: float, tries: int = 100) -> int:
    return sum(quota.take(B, now) for _ in range(tries))


def test_sixteen_records_at_once_and_no_more() -> None:
    quota = RecordQuota()
    assert taken(quota, 50.0) == 16
    assert quota.withheld == {B: 84}
    assert quota.take(C, 50.0), "every peer has a stock of its own"


@pytest.mark.parametrize(("waited_s", "more"), [(59.99, 0), (60.0, 1), (119.0, 1), (600.0, 10)])
def test_one_more_every_minute(waited_s: float, more: int) -> None:
    quota = RecordQuota()
    taken(quota, 50.0)
    assert taken(quota, 50.0 + waited_s) == more


def test_fractions_of_a_minute_are_not_lost() -> None:
    quota = RecordQuota()
    taken(quota, 0.0)
    assert [quota.take(B, now) for now in (45.0, 90.0, 120.0)] == [False, True, True]


@pytest.mark.parametrize(("rounds", "more"), [(0, 0), (1, 4), (3, 12), (5, 16)])
def test_four_more_for_every_round_of_our_own(rounds: int, more: int) -> None:
    quota = RecordQuota()
    taken(quota, 50.0)
    for _ in range(rounds):
        quota.round_done()
    assert taken(quota, 50.0) == more


def test_tokens_are_limited_to_the_stock() -> None:
    quota = RecordQuota()
    quota.take(B, 0.0)
    assert taken(quota, 1e6) == 16
    quota.round_done()
    assert taken(quota, 1e6) == 4


def test_a_clock_that_goes_back_takes_no_tokens() -> None:
    quota = RecordQuota()
    taken(quota, 5000.0, tries=15)
    assert quota.take(B, 0.0)
    assert not quota.take(B, 0.0)


def test_only_tokens_of_removed_peers_are_forgotten() -> None:
    quota = RecordQuota()
    taken(quota, 0.0)
    assert not all(quota.take(C, 0.0) for _ in range(17))
    quota.keep_only({C})
    assert quota.withheld == {C: 1}
    assert not quota.take(C, 0.0)
    assert quota.take(B, 0.0)
