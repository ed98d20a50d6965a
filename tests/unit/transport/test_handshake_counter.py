"""Handshakes without a call are counted as failed."""

from __future__ import annotations

from lightyear_node.transport.handshake_counter import HandshakeCounter
from lightyear_node.transport.limits import CONNECTIONS_KEPT, HANDSHAKES_KEPT


def test_a_handshake_followed_by_a_call_has_not_failed() -> None:
    handshakes = HandshakeCounter(10.0)
    handshakes.handshake_started(0.0)
    handshakes.call_received("ipv4:10.0.0.2:1234")
    assert handshakes.take_failed(100.0) == 0


def test_a_handshake_without_a_call_is_counted_once_after_the_timeout() -> None:
    handshakes = HandshakeCounter(10.0)
    handshakes.handshake_started(0.0)
    handshakes.handshake_started(5.0)
    assert [handshakes.take_failed(now) for now in (10.0, 10.1, 12.0, 16.0, 99.0)] == [
        0,
        1,
        0,
        1,
        0,
    ]


def test_further_calls_on_one_connection_complete_no_other_handshake() -> None:
    handshakes = HandshakeCounter(10.0)
    handshakes.handshake_started(0.0)
    handshakes.call_received("ipv4:10.0.0.2:1234")
    handshakes.handshake_started(1.0)
    handshakes.call_received("ipv4:10.0.0.2:1234")
    assert handshakes.take_failed(20.0) == 1


def test_a_flood_of_connections_takes_bounded_memory() -> None:
    handshakes = HandshakeCounter(10.0)
    for port in range(3 * CONNECTIONS_KEPT):
        handshakes.handshake_started(0.0)
        handshakes.call_received(f"ipv4:10.0.0.2:{port}")
    assert handshakes.take_failed(99.0) == 0
    # The last connection is still known, so its next call completes no handshake; the first one
    # is forgotten.
    for port, failed in ((3 * CONNECTIONS_KEPT - 1, 1), (0, 0)):
        handshakes.handshake_started(100.0)
        handshakes.call_received(f"ipv4:10.0.0.2:{port}")
        assert handshakes.take_failed(199.0) == failed


def test_a_flood_of_handshakes_takes_bounded_memory_and_each_is_counted() -> None:
    handshakes = HandshakeCounter(10.0)
    for _ in range(HANDSHAKES_KEPT + 10):
        handshakes.handshake_started(0.0)
    assert handshakes.pending == HANDSHAKES_KEPT
    assert handshakes.take_failed(1.0) == 10
    assert handshakes.take_failed(20.0) == HANDSHAKES_KEPT
