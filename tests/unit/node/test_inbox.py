"""The inbox always has capacity for this site's own events."""

from __future__ import annotations

import asyncio

from lightyear_node.node.inbox import EVENTS_MAX, Inbox
from lightyear_node.protocol.events import Tick, Trained
from lightyear_node.types import Digest


def test_own_events_fit_however_many_events_peers_cause() -> None:
    async def use() -> None:
        inbox = Inbox()
        for _ in range(2 * EVENTS_MAX):
            inbox.hear(Tick())
        ours = Trained(Digest("ours"))
        inbox.put(ours)
        waiting = [await inbox.next() for _ in range(EVENTS_MAX // 2)]
        assert waiting == [(Tick(), ())] * (EVENTS_MAX // 2)
        assert await inbox.next() == (ours, ())

    asyncio.run(use())


def test_the_inbox_returns_a_tick_when_nothing_happens() -> None:
    assert asyncio.run(Inbox().next()) == (Tick(), ())
