"""What a site makes of what others say: what can be true becomes events for its barrier."""

from __future__ import annotations

from lightyear_node.barrier import Accused, Announced, Event, Heard, Memory, Reported
from lightyear_node.records import PeerName, Update
from tests.sim.world import Message, World

REPEATED = 0.1
"""How often what a peer has said before is told again: enough to show that it changes nothing."""


class Ear:
    """Of one life: what was heard before is forgotten with the process."""

    def __init__(self, name: PeerName, world: World) -> None:
        self._name = name
        self._world = world
        self._known: dict[PeerName, Update] = {}
        self._last_seen: dict[PeerName, tuple[Update, ...]] = {}

    def is_signed(self, update: Update) -> bool:
        return update in self._world.signed

    def own(self, update: Update | None) -> Update | None:
        """An update of ours that another site holds, if we have really signed it."""
        return update if update and update.peer == self._name and self.is_signed(update) else None

    def understand(self, message: Message) -> list[Event]:
        by, update = message.by, message.update
        events: list[Event] = []
        if update is None:
            events.append(Heard(by, message.phase, message.progress))
        elif update.peer != by or not self.is_signed(update):
            self._world.counts["messages refused"] += 1
            return []
        else:
            self._get_to_know(update)
            events.append(Announced(update, message.phase, message.progress))
        seen = tuple(one for one in self._news(by, message.seen) if self.is_signed(one))
        for one in seen:
            self._get_to_know(one)
        if seen:
            events.append(Reported(by, seen))
        for first, second in message.evidence:
            contradict = (first.peer, first.age) == (second.peer, second.age) and first != second
            if contradict and self.is_signed(first) and self.is_signed(second):
                events.append(Accused(first, second))
        return events

    def newest_of(self, peer: PeerName, durable: Memory) -> Update | None:
        known = self._known.get(peer)
        candidates = (*durable.vouched.get(peer, ()), *([known] if known else ()))
        return max(candidates, key=lambda update: update.age, default=None)

    def _news(self, by: PeerName, seen: tuple[Update, ...]) -> tuple[Update, ...]:
        """What a peer vouches for, mostly without what it has said before."""
        before = self._last_seen.get(by, ())
        self._last_seen[by] = seen
        if self._world.chance(REPEATED):
            return seen
        return tuple(one for one in seen if one not in before) if seen != before else ()

    def _get_to_know(self, update: Update) -> None:
        known = self._known.get(update.peer)
        if known is None or known.age < update.age:
            self._known[update.peer] = update
