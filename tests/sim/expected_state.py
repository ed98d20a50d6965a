"""The invariant checker's own record of what each site has received and done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from lightyear_node.protocol.state_machine import Barrier
from lightyear_node.types import Digest, Generation, PeerName, Round, Update

Age = tuple[Generation, Round]
Sealing = tuple[PeerName, Generation, Round]
NO_GENERATION = Generation(0)
NEVER: Age = (Generation(-1), Round(-1))
ECHOES_KEPT = 64
"""Rounds of a peer whose echoes are kept; longer than any message is delayed."""


@dataclass(slots=True)
class ProcessState:
    """What a process has received since its start: all that it may base a decision on."""

    barrier: Barrier
    generations: dict[PeerName, tuple[Generation, Round]]
    """Each peer's newest generation and the round at which its probation ends."""
    tables: list[tuple[object, str]]
    reached: dict[PeerName, Round] = field(default_factory=dict)
    fetched: dict[PeerName, Update] = field(default_factory=dict)
    answered: set[PeerName] = field(default_factory=set)
    own: Update | None = None
    """The newest of its own updates that a peer has reported."""
    accused: Update | None = None
    """Proven equivocation in this step, which must lead to a quarantine."""
    age: Age = NEVER
    steps: int = 0

    def supported(self, vouchers: int, excluded: Iterable[PeerName]) -> int:
        """Return the highest round that so many peers are known to have reached."""
        away = set(excluded)
        reached = sorted(round for peer, round in self.reached.items() if peer not in away)
        return reached[-vouchers] if len(reached) >= vouchers else -1


@dataclass(slots=True)
class History:
    """What a site has done, as far as its disk records it."""

    decided: dict[Age, tuple[Update, ...]] = field(default_factory=dict)
    merged: set[Sealing] = field(default_factory=set)
    committed: list[Age] = field(default_factory=lambda: [NEVER])
    justified: int = 0
    """The highest round that it had a reason to be in."""
    generation: Generation = NO_GENERATION
    incomplete: bool = False
    """It has recorded that its state is incomplete."""
    generations: dict[PeerName, tuple[Generation, Round]] = field(default_factory=dict)
    announced: Update | None = None
    vouched: frozenset[Update] = frozenset()
    echoed: dict[PeerName, dict[Round, Digest]] = field(default_factory=dict)
    quarantined: dict[PeerName, Age] = field(default_factory=dict)
    pardoned: dict[PeerName, Age] = field(default_factory=dict)
    blocked: frozenset[PeerName] = frozenset()

    @property
    def excluded(self) -> frozenset[PeerName]:
        return self.blocked | self.quarantined.keys()

    def copy(self) -> History:
        return History(
            dict(self.decided),
            set(self.merged),
            list(self.committed),
            self.justified,
            self.generation,
            self.incomplete,
            dict(self.generations),
            self.announced,
            self.vouched,
            {peer: dict(echoes) for peer, echoes in self.echoed.items()},
            dict(self.quarantined),
            dict(self.pardoned),
            self.blocked,
        )

    def echo(self, update: Update) -> Digest:
        """Return the digest that this site first reported for a peer's round."""
        echoes = self.echoed.setdefault(update.peer, {})
        first = echoes.setdefault(update.round, update.digest)
        if len(echoes) > ECHOES_KEPT:
            del echoes[min(echoes)]
        return first


def widest(tables: Iterable[tuple[object, str]]) -> tuple[int, str]:
    """Return the size and name of the largest table."""
    return max((len(getattr(part, name)), name) for part, name in tables)


def longest_window(tables: Iterable[tuple[object, str]]) -> int:
    """Return the largest number of updates kept in one slot of a table."""
    slots = (slot for part, name in tables for slot in _slots(getattr(part, name)))
    return max(map(len, slots), default=0)


def _slots(table: object) -> Iterator[tuple[Update, ...]]:
    """Yield the tuples of updates in a table with one level of keys, or with several."""
    if isinstance(table, dict):
        for value in table.values():
            yield from _slots(value)
    elif isinstance(table, tuple) and all(isinstance(one, Update) for one in table):
        yield table
