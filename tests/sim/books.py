"""The referee's books: what each site has been told and has done, as far as it should know it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lightyear_node.barrier import Barrier
from lightyear_node.records import Digest, Generation, PeerName, Round, Update

Age = tuple[Generation, Round]
Sealing = tuple[PeerName, Generation, Round]
UNBORN = Generation(0)
NEVER: Age = (Generation(-1), Round(-1))
ECHOES_KEPT = 64
"""Rounds of a peer whose echoes the referee remembers, more than any message is late."""


@dataclass(slots=True)
class Life:
    """What a process has been told since it was started: all that it may base a decision on."""

    barrier: Barrier
    generations: dict[PeerName, tuple[Generation, Round]]
    """Each peer's newest generation, and the round before which nothing of it is merged."""
    tables: list[tuple[object, str]]
    reached: dict[PeerName, Round] = field(default_factory=dict)
    fetched: dict[PeerName, Update] = field(default_factory=dict)
    answered: set[PeerName] = field(default_factory=set)
    own: Update | None = None
    """The newest update of its own that it was told of."""
    accused: Update | None = None
    """Told of just now, with another of the same age: must have consequences in this step."""
    age: Age = NEVER
    steps: int = 0

    def supported(self, vouchers: int, excluded: Iterable[PeerName]) -> int:
        """The highest round that so many peers are known to have reached."""
        away = set(excluded)
        reached = sorted(round for peer, round in self.reached.items() if peer not in away)
        return reached[-vouchers] if len(reached) >= vouchers else -1


@dataclass(slots=True)
class History:
    """What a site has done, as far as its disk remembers it."""

    decided: dict[Age, tuple[Update, ...]] = field(default_factory=dict)
    merged: set[Sealing] = field(default_factory=set)
    committed: list[Age] = field(default_factory=lambda: [NEVER])
    justified: int = 0
    """The highest round that it has had a reason to be in."""
    generation: Generation = UNBORN
    doubted: bool = False
    """It has noted that its memory is not all there was."""
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

    def copied(self) -> History:
        return History(
            dict(self.decided),
            set(self.merged),
            list(self.committed),
            self.justified,
            self.generation,
            self.doubted,
            dict(self.generations),
            self.announced,
            self.vouched,
            {peer: dict(echoes) for peer, echoes in self.echoed.items()},
            dict(self.quarantined),
            dict(self.pardoned),
            self.blocked,
        )

    def echo(self, update: Update) -> Digest:
        """What this site has told others of a peer's round, first of all."""
        echoes = self.echoed.setdefault(update.peer, {})
        first = echoes.setdefault(update.round, update.digest)
        if len(echoes) > ECHOES_KEPT:
            del echoes[min(echoes)]
        return first


def tables_of(barrier: Barrier) -> list[tuple[object, str]]:
    """Whatever a barrier keeps a collection in; the referee need not know what it is for."""
    view = barrier._view
    return [
        (part, name)
        for part in (barrier, view, view.testimony, barrier._closing, barrier._closing._patience)
        for name, value in vars(part).items()
        if isinstance(value, dict | set | frozenset | list | tuple)
    ]


def widest(tables: Iterable[tuple[object, str]]) -> tuple[int, str]:
    """How many entries the largest table has."""
    return max((len(getattr(part, name)), name) for part, name in tables)


def longest_window(barrier: Barrier) -> int:
    """How many updates of one peer are remembered in one slot."""
    testimony = barrier._view.testimony
    windows = [*testimony.vouched.values()]
    for reports in testimony._reports.values():
        windows += reports.values()
    return max(map(len, windows), default=0)
