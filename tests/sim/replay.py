"""Real sites' journals, read by the referee of the simulator.

A journal tells what its site announced, decided and committed; Lamport stamps tell in which order
that happened across sites, as far as one could have known of the other.  So the same books are kept
as for a simulated federation, and the same invariants checked: S1 to S7, and of S10 and probation
what journals can show.  They do not show when a site heard of what; it may have known, at the
latest, all that has a lower stamp.

A site that lost its disk has a second journal that knows nothing of the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightyear_node.barrier import Announced, Answered, Barrier, Cause, Decision, Memory, Terms
from lightyear_node.journal import Record
from lightyear_node.records import (
    ROUND_MAX,
    Digest,
    Generation,
    PeerName,
    Reason,
    Round,
    Update,
)
from tests.sim.referee import InvariantBroken, Referee

KINDS = ("seal", "decision", "commit", "evidence", "blocked", "pardon", "rollback")
DELIVERED_UNSEEN = (Reason.STALE_ROUND, Reason.PROBATION, Reason.UNCONFIRMED)
"""With these a peer may have delivered and was not judged; its line does not say what."""


@dataclass(slots=True)
class _Disk:
    """One journal, as far as it has been read."""

    site: PeerName
    number: int
    has_other_members: bool
    sealed: int = -1


def replay(terms: Terms, journals: Mapping[PeerName, Sequence[Sequence[Record]]]) -> Referee:
    """Raise `InvariantBroken` at the first record that cannot be.

    Each site has its journals in the order of its disks; `terms` are those of the first site.
    Sites without any journal may have announced whatever others say of them.
    """
    reading = _Reading(terms, list(journals))
    for disk, record in _in_order(journals):
        reading.read(disk, record)
    return reading.referee


def _in_order(
    journals: Mapping[PeerName, Sequence[Sequence[Record]]],
) -> Iterator[tuple[_Disk, Record]]:
    """By Lamport stamp: records with the same one cannot have known of each other."""
    found: list[tuple[int, str, int, _Disk, Record]] = []
    for site, disks in journals.items():
        before = 0
        for number, records in enumerate(disks):
            kinds = {record.kind for record in records}
            disk, last = _Disk(site, number, "members" in kinds), 0
            for record in records:
                # A new disk begins at nothing, and has heard of the others before it seals.
                before = max(before, last) if record.kind in KINDS else last
                if record.lamport <= before:
                    text = f"{site} has stamp {record.lamport} after {before}"
                    raise InvariantBroken("Lamport's order", text)
                last = record.lamport
                if record.kind in KINDS:
                    found.append((record.lamport, site, record.seq, disk, record))
    found.sort(key=lambda one: one[:3])
    return ((disk, record) for *_, disk, record in found)


class _Reading:
    def __init__(self, terms: Terms, known: list[PeerName]) -> None:
        self._terms = terms
        self._sites = sorted(terms.peers.union(known))
        self._known = known
        self._signed: set[Update] = set()
        self._disks = dict.fromkeys(known, 0)
        self._barriers: dict[PeerName, Barrier] = {}
        """Only to tell the referee in which round a site is; they decide nothing."""
        self._newest: dict[PeerName, Update] = {}
        self.referee = Referee(self._sites, known, terms, self._signed)
        for site in known:
            self._boot(site)

    def read(self, disk: _Disk, record: Record) -> None:
        if disk.number > self._disks[disk.site]:
            self._disks[disk.site] = disk.number
            self.referee.forgets(disk.site)
            self._boot(disk.site)
        self._barriers[disk.site].round = Round(record.round)
        match record.kind:
            case "seal":
                self._seal(disk, Update(**record.body["update"]))
            case "decision":
                self._decide(disk, record.body)
            case "commit":
                self.referee.commits(disk.site, Round(record.round))
            case "evidence":
                first, second = (
                    Update(**record.body[which]["manifest"]["update"])
                    for which in ("first", "second")
                )
                self._believe(first, second)
                self.referee.accuses(disk.site, first, second)
            case _:
                self.referee.notes(disk.site, record.kind, record.body)

    def _boot(self, site: PeerName) -> None:
        terms = replace(self._terms, peers=frozenset(self._sites) - {site})
        self._barriers[site] = Barrier(site, terms, Memory(Generation(0), Round(0)))
        self.referee.boots(site, self._barriers[site], terms)
        for peer in terms.peers:
            self.referee.tells(site, Answered(peer, self._newest.get(site)))
        for update in self._newest.values():
            self._tell(site, update)
        for stranger in set(self._sites).difference(self._known):
            anything = Update(stranger, Generation(0), Round(ROUND_MAX), Digest(""))
            self._tell(site, anything)

    def _tell(self, site: PeerName, update: Update) -> None:
        if update.peer != site:
            self.referee.tells(site, Announced(update))

    def _seal(self, disk: _Disk, update: Update) -> None:
        site = disk.site
        if update.peer != site:
            raise InvariantBroken("S3", f"{site} seals {update}, which is not its own")
        self._signed.add(update)
        self.referee.persists(site, Memory(update.generation, update.round, announced=update))
        self.referee.says(site, update, ())
        self.referee.signs(site, update)
        disk.sealed = update.round
        self._newest[site] = update
        for other in self._known:
            self._tell(other, update)

    def _decide(self, disk: _Disk, body: Mapping[str, Any]) -> None:
        site, round = disk.site, body["round"]
        accepted = tuple(Update(**update) for update in body["accepted"])
        if round != disk.sealed:
            raise InvariantBroken("S5", f"{site} decides round {round} after {disk.sealed}")
        delivered = sum(
            line["digest"] is not None or line["reason"] in DELIVERED_UNSEEN
            for line in body["verdicts"]
        )
        beyond = self._beyond(site, round)
        # Where members came and went, so did the number that was needed.
        enough = disk.has_other_members or delivered >= self._terms.min_peers
        if not enough and beyond <= self._terms.faulty_max:
            text = f"with {delivered} delivered and {beyond} beyond it"
            raise InvariantBroken("S10", f"{site} closes round {round} {text}")
        self._believe(*accepted)
        decision = Decision(round, Cause(body["cause"]), body["why"], accepted, ())
        self.referee.decides(site, decision)
        self.referee.merges(site, decision)

    def _believe(self, *updates: Update) -> None:
        """Sites without a journal may have signed anything."""
        self._signed.update(update for update in updates if update.peer not in self._known)

    def _beyond(self, site: PeerName, round: int) -> int:
        """How many others have, or may have, announced something later than this round."""
        others = [update for peer, update in self._newest.items() if peer != site]
        return sum(u.round > round for u in others) + len(self._sites) - len(self._known)
