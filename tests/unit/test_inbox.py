"""What waits for the node's loop: others' words never take the room of our own."""

from __future__ import annotations

import asyncio

from lightyear_node.barrier import Tick, Trained
from lightyear_node.driver import EVENTS_MAX, Inbox
from lightyear_node.records import Digest


def test_however_much_peers_say_there_is_room_for_our_own() -> None:
    async def use() -> None:
        inbox = Inbox()
        for _ in range(2 * EVENTS_MAX):
            inbox.hear(Tick())
        ours = Trained(Digest("ours"))
        inbox.put(ours)
        waiting = [await inbox.next() for _ in range(EVENTS_MAX // 2)]
        assert waiting == [Tick()] * (EVENTS_MAX // 2)
        assert await inbox.next() == ours

    asyncio.run(use())


def test_a_loop_without_news_turns_all_the_same() -> None:
    assert asyncio.run(Inbox().next()) == Tick()
