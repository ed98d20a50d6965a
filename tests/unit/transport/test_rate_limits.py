"""Limits of concurrent calls and call rates; a peer over a limit is refused alone."""

from __future__ import annotations

import contextlib

import pytest

from lightyear_node.transport import limits
from lightyear_node.transport.rate_limits import CONCURRENT_MAX, RateLimits, RequestKind
from lightyear_node.types import PeerName

A, B, C = (PeerName(f"site-{letter}") for letter in "abc")


@pytest.mark.parametrize(
    "kind", [RequestKind.HELLO, RequestKind.ANNOUNCE, RequestKind.REVERSE_STREAM]
)
def test_concurrent_calls_of_one_kind_are_limited_per_peer(kind: RequestKind) -> None:
    rates = RateLimits()
    with contextlib.ExitStack() as calls:
        for _ in range(CONCURRENT_MAX[kind]):
            assert calls.enter_context(rates.count_call(A, kind)) is None
        assert calls.enter_context(rates.count_call(A, kind)) == "too_many_calls"
        assert calls.enter_context(rates.count_call(B, kind)) is None
    with rates.count_call(A, kind) as denied:
        assert denied is None, "ended calls do not count"


def test_faulty_peers_cannot_take_all_slots_for_fetches() -> None:
    faulty_max = 3
    rates = RateLimits(faulty_max)
    with contextlib.ExitStack() as calls:
        for number in range(faulty_max):
            for _ in range(limits.FETCHES_PER_PEER_MAX):
                assert (
                    calls.enter_context(
                        rates.count_call(PeerName(f"bad-{number}"), RequestKind.FETCH)
                    )
                    is None
                )
        call = rates.count_call(PeerName("bad-0"), RequestKind.FETCH)
        assert calls.enter_context(call) == "too_many_fetches"
        for number in range(limits.FETCHES_MAX):
            call = rates.count_call(PeerName(f"good-{number}"), RequestKind.FETCH)
            assert calls.enter_context(call) is None
        assert calls.enter_context(rates.count_call(A, RequestKind.FETCH)) == "too_many_fetches"


def test_the_rate_is_limited_per_kind_and_peer() -> None:
    rates = RateLimits()
    refusals = [
        rates.rate_exceeded(A, RequestKind.ANNOUNCE, 100.0) for _ in range(limits.CALLS_BURST + 1)
    ]
    assert refusals == [None] * limits.CALLS_BURST + ["too_often"]
    assert rates.rate_exceeded(A, RequestKind.FETCH, 100.0) is None
    assert rates.rate_exceeded(B, RequestKind.ANNOUNCE, 100.0) is None
    assert rates.rate_exceeded(A, RequestKind.ANNOUNCE, 101.0) is None


def test_calls_are_refused_for_a_while_after_many_malformed_messages() -> None:
    rates = RateLimits()
    for second in range(limits.STRIKES_MAX - 1):
        assert not rates.strike(A, 100.0 + second)
    assert rates.strike(A, 110.0)
    for kind in RequestKind:
        assert rates.rate_exceeded(A, kind, 110.0 + limits.COOL_DOWN_S - 1) == "cooling_down"
        assert rates.rate_exceeded(B, kind, 111.0) is None
    assert rates.rate_exceeded(A, RequestKind.HELLO, 110.0 + limits.COOL_DOWN_S) is None


def test_occasional_malformed_messages_are_tolerated() -> None:
    rates = RateLimits()
    every_s = limits.STRIKES_S / (limits.STRIKES_MAX - 2)
    assert not any(rates.strike(A, number * every_s) for number in range(100))


def test_a_removed_peer_is_forgotten() -> None:
    rates = RateLimits()
    for _ in range(limits.STRIKES_MAX):
        rates.strike(A, 1.0)
    rates.rate_exceeded(B, RequestKind.HELLO, 1.0)
    rates.forget_all_but([C])
    assert rates.rate_exceeded(A, RequestKind.HELLO, 2.0) is None
    for _ in range(limits.CALLS_BURST):
        assert rates.rate_exceeded(B, RequestKind.HELLO, 1.0) is None
