"""Who knocked and never came in."""

from __future__ import annotations

from lightyear_node.transport.doorway import CONNECTIONS_KEPT, KNOCKS_KEPT, Doorway


def test_a_peer_that_calls_in_time_is_no_stranger() -> None:
    doorway = Doorway(10.0)
    doorway.knock(0.0)
    doorway.enter("ipv4:10.0.0.2:1234")
    assert doorway.turned_away(100.0) == 0


def test_a_knock_without_a_call_is_counted_once_its_time_is_over() -> None:
    doorway = Doorway(10.0)
    doorway.knock(0.0)
    doorway.knock(5.0)
    assert [doorway.turned_away(now) for now in (10.0, 10.1, 12.0, 16.0, 99.0)] == [0, 1, 0, 1, 0]


def test_further_calls_on_one_connection_answer_for_nobody_else() -> None:
    doorway = Doorway(10.0)
    doorway.knock(0.0)
    doorway.enter("ipv4:10.0.0.2:1234")
    doorway.knock(1.0)
    doorway.enter("ipv4:10.0.0.2:1234")
    assert doorway.turned_away(20.0) == 1


def test_a_flood_of_connections_takes_no_memory() -> None:
    doorway = Doorway(10.0)
    for port in range(3 * CONNECTIONS_KEPT):
        doorway.knock(0.0)
        doorway.enter(f"ipv4:10.0.0.2:{port}")
    assert len(doorway._inside) == CONNECTIONS_KEPT
    assert doorway.turned_away(99.0) == 0


def test_a_crowd_at_the_door_takes_no_memory_and_everybody_counts() -> None:
    doorway = Doorway(10.0)
    for _ in range(KNOCKS_KEPT + 10):
        doorway.knock(0.0)
    assert len(doorway._knocks) == KNOCKS_KEPT
    assert doorway.turned_away(1.0) == 10
    assert doorway.turned_away(20.0) == KNOCKS_KEPT
