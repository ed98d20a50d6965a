"""The queue of events that wait for the event loop."""

from __future__ import annotations

import asyncio
import contextlib

from lightyear_node.protocol.events import Event, Tick
from lightyear_node.types import SignedManifest

Proofs = tuple[SignedManifest, ...]
"""The signed manifests of the updates that an event names."""

TICK_S = 0.2
"""The barrier sees a `Tick` when nothing else has happened for so long."""
EVENTS_MAX = 4096
"""Capacity of the queue.  Announcements are rate-limited per peer, so it never fills."""


class Inbox:
    """Half of the capacity is reserved for this site's own events."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[tuple[Event, Proofs]] = asyncio.Queue(EVENTS_MAX)

    def put(self, event: Event) -> None:
        """Queue an event of this site."""
        self._events.put_nowait((event, ()))

    def hear(self, event: Event, *proofs: SignedManifest) -> None:
        """Queue an event caused by a peer, or drop it when half full: peers repeat themselves."""
        if self._events.qsize() < EVENTS_MAX // 2:
            self._events.put_nowait((event, proofs))

    async def next(self) -> tuple[Event, Proofs]:
        """The next event, or a `Tick` after `TICK_S` without one."""
        event: Event = Tick()
        proofs: Proofs = ()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                event, proofs = await self._events.get()
        return event, proofs
