"""How much one peer may ask: over a limit it is denied alone."""

from __future__ import annotations

import contextlib

import pytest

from lightyear_node.records import PeerName
from lightyear_node.transport import limits
from lightyear_node.transport.gate import AT_ONCE, Ask, Gate

A, B, C = (PeerName(f"site-{letter}") for letter in "abc")


@pytest.mark.parametrize("ask", [Ask.HELLO, Ask.ANNOUNCE, Ask.LEND])
def test_calls_of_one_kind_are_limited_for_each_peer(ask: Ask) -> None:
    gate = Gate()
    with contextlib.ExitStack() as calls:
        for _ in range(AT_ONCE[ask]):
            assert calls.enter_context(gate.enter(A, ask)) is None
        assert calls.enter_context(gate.enter(A, ask)) == "too_many_calls"
        assert calls.enter_context(gate.enter(B, ask)) is None
    with gate.enter(A, ask) as denied:
        assert denied is None, "what has ended does not count"


def test_the_faulty_cannot_take_every_place_for_fetches() -> None:
    faulty_max = 3
    gate = Gate(faulty_max)
    with contextlib.ExitStack() as calls:
        for number in range(faulty_max):
            for _ in range(limits.FETCHES_PER_PEER_MAX):
                assert calls.enter_context(gate.enter(PeerName(f"bad-{number}"), Ask.FETCH)) is None
        assert calls.enter_context(gate.enter(PeerName("bad-0"), Ask.FETCH)) == "too_many_fetches"
        for number in range(limits.FETCHES_MAX):
            assert calls.enter_context(gate.enter(PeerName(f"good-{number}"), Ask.FETCH)) is None
        assert calls.enter_context(gate.enter(A, Ask.FETCH)) == "too_many_fetches"


def test_a_flood_is_stemmed_by_kind_and_peer() -> None:
    gate = Gate()
    answers = [gate.hurried(A, Ask.ANNOUNCE, 100.0) for _ in range(limits.CALLS_BURST + 1)]
    assert answers == [None] * limits.CALLS_BURST + ["too_often"]
    assert gate.hurried(A, Ask.FETCH, 100.0) is None
    assert gate.hurried(B, Ask.ANNOUNCE, 100.0) is None
    assert gate.hurried(A, Ask.ANNOUNCE, 101.0) is None


def test_who_keeps_sending_rubbish_is_not_listened_to_for_a_while() -> None:
    gate = Gate()
    for second in range(limits.STRIKES_MAX - 1):
        assert not gate.strike(A, 100.0 + second)
    assert gate.strike(A, 110.0)
    for ask in Ask:
        assert gate.hurried(A, ask, 110.0 + limits.COOL_DOWN_S - 1) == "cooling_down"
        assert gate.hurried(B, ask, 111.0) is None
    assert gate.hurried(A, Ask.HELLO, 110.0 + limits.COOL_DOWN_S) is None


def test_rubbish_now_and_then_is_forgiven() -> None:
    gate = Gate()
    every_s = limits.STRIKES_S / (limits.STRIKES_MAX - 2)
    assert not any(gate.strike(A, number * every_s) for number in range(100))


def test_a_removed_peer_is_forgotten() -> None:
    gate = Gate()
    for _ in range(limits.STRIKES_MAX):
        gate.strike(A, 1.0)
    gate.hurried(B, Ask.HELLO, 1.0)
    gate.keep([C])
    assert gate.hurried(A, Ask.HELLO, 2.0) is None
    for _ in range(limits.CALLS_BURST):
        assert gate.hurried(B, Ask.HELLO, 1.0) is None
