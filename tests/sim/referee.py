"""The referee: knows the truth about a simulated federation and checks every step against it.

It watches what sites are told and what they do, and keeps its own books; it never asks a barrier
what it believes, so that one that is wrong about itself is caught.  S1 to S10 are the names of the
protocol's invariants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from lightyear_node.barrier import (
    Announced,
    Barrier,
    Decision,
    Event,
    Excluded,
    Fetched,
    Judge,
)
from lightyear_node.records import Digest, Generation, PeerName, Round, Update

Sealing = tuple[PeerName, Generation, Round]


class InvariantBroken(AssertionError):
    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant} is broken: {text}")
        self.invariant = invariant


@dataclass(slots=True)
class _Life:
    """What a process has been told since it was started: all that it may base a decision on."""

    excluded: frozenset[PeerName]
    tables: Sequence[tuple[object, str]]
    reached: dict[PeerName, Round] = field(default_factory=dict)
    fetched: dict[PeerName, Update] = field(default_factory=dict)
    round: int = 0


@dataclass(slots=True)
class _History:
    """What a site has done, over all its lives."""

    decided: dict[Round, tuple[Update, ...]] = field(default_factory=dict)
    merged: set[Sealing] = field(default_factory=set)
    committed: list[Round] = field(default_factory=lambda: [Round(-1)])


class Referee:
    def __init__(
        self, sites: list[PeerName], honest: list[PeerName], min_peers: int, faulty_max: int
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.highest = Round(-1)
        """The highest tag that an honest site has announced so far."""
        self._sites = frozenset(sites)
        self._min_peers = min_peers
        self._vouchers = faulty_max + 1
        self._shown: dict[Sealing, Digest] = {}
        self._lives: dict[PeerName, _Life] = {}
        self._histories = {site: _History() for site in honest}

    def commits_of(self, site: PeerName) -> int:
        return len(self._histories[site].committed) - 1

    def merged_by(self, site: PeerName) -> Mapping[Round, tuple[Update, ...]]:
        """What a site merged in each of its rounds."""
        return self._histories[site].decided

    # What a site is told.

    def boots(self, site: PeerName, barrier: Barrier, excluded: frozenset[PeerName]) -> None:
        # Whatever the barrier keeps a collection in is a table; the referee need not know which.
        tables = [
            (part, name)
            for part in (barrier, barrier._view)
            for name, value in vars(part).items()
            if isinstance(value, dict | set | frozenset | list | tuple)
        ]
        self._lives[site] = _Life(excluded, tables)

    def tells(self, site: PeerName, event: Event) -> None:
        life = self._lives[site]
        match event:
            case Announced(update):
                before = life.reached.get(update.peer, update.round)
                life.reached[update.peer] = max(before, update.round)
            case Fetched(update):
                life.fetched[update.peer] = update
            case Excluded(peers):
                life.excluded = peers

    # What a site does.

    def steps(self, site: PeerName, barrier: Barrier) -> None:
        life = self._lives[site]
        if barrier.round < life.round:
            _broken("S2", f"{site} goes back from round {life.round} to {barrier.round}")
        life.round = barrier.round
        for part, name in life.tables:
            entries = len(getattr(part, name))
            if entries > len(self._sites):
                _broken("S8", f"{name} of {site} has {entries} entries")

    def seals(self, site: PeerName, update: Update) -> None:
        vouchers = sum(reached >= update.round for reached in self._lives[site].reached.values())
        is_next = update.round == self._histories[site].committed[-1] + 1
        if not is_next and vouchers < self._vouchers:
            _broken("S10", f"{site} jumps to round {update.round} with {vouchers} vouchers")

    def shows(self, site: PeerName, update: Update) -> None:
        """An update is told to anybody at all."""
        digest = self._shown.setdefault((site, *update.age), update.digest)
        if digest != update.digest:
            _broken("S1", f"{site} shows two different updates of round {update.round}")
        if update.round > self.highest + 1:
            text = f"{site} announces round {update.round}; until now {self.highest} was highest"
            _broken("S6", text)
        self.highest = max(self.highest, update.round)

    def closes(self, site: PeerName, judge: Judge) -> None:
        life = self._lives[site]
        trusted = self._sites - life.excluded
        delivered = {peer for peer, u in life.fetched.items() if u.round >= judge.round} & trusted
        beyond = {peer for peer, round in life.reached.items() if round > judge.round} & trusted
        if len(delivered) < self._min_peers and len(beyond) < self._vouchers:
            text = f"with {len(delivered)} delivered and {len(beyond)} beyond it"
            _broken("S10", f"{site} closes round {judge.round} ({judge.why}) {text}")
        for update in judge.updates:
            if update.peer not in trusted or life.fetched.get(update.peer) != update:
                _broken("S3", f"{site} judges {update}, which it has not fetched")
        accounted = [update.peer for update in judge.updates] + [peer for peer, _ in judge.missing]
        if sorted(accounted) != sorted(self._sites - {site}):
            _broken("S3", f"{site} closes round {judge.round} with a line for each of {accounted}")
        self.counts[f"closed by {judge.cause}"] += 1

    def merges(self, site: PeerName, decision: Decision) -> None:
        history, accepted, round = self._histories[site], decision.accepted, decision.round
        if round in history.decided:
            if history.decided[round] != accepted:
                _broken("S5", f"{site} decides round {round} again, and differently")
            self.counts["merged again"] += 1
            return
        history.decided[round] = accepted
        if len({update.peer for update in accepted}) < len(accepted):
            _broken("S3", f"{site} merges one peer twice in round {round}")
        for update in accepted:
            sealing: Sealing = (update.peer, *update.age)
            # Liars may have shown anything; whether an honest site has is known.
            honest = update.peer in self._histories
            if update.peer == site or (honest and self._shown.get(sealing) != update.digest):
                _broken("S3", f"{site} merges {update}, which was never announced")
            if update.round < round:
                _broken("S4", f"{site} merges {update} in round {round}")
            if sealing in history.merged:
                _broken("S4b", f"{site} merges {update} once more, in round {round}")
            history.merged.add(sealing)
        self.counts["merged updates"] += len(accepted)
        self.counts["empty merges"] += not accepted

    def commits(self, site: PeerName, round: Round) -> None:
        history = self._histories[site]
        if round <= history.committed[-1]:
            _broken("S2", f"{site} commits round {round} after {history.committed[-1]}")
        if round not in history.decided:
            _broken("S5", f"{site} commits round {round}, which it has not decided")
        if round > self.highest:
            _broken("S6", f"{site} commits round {round}, which no honest site has announced")
        history.committed.append(round)
        self.counts["commits"] += 1


def _broken(invariant: str, text: str) -> NoReturn:
    raise InvariantBroken(invariant, text)
