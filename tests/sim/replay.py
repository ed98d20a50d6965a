"""Real sites' journals, read by the referee of the simulator.

A journal tells what its site announced, decided and committed; Lamport stamps tell in which order
that happened across sites, as far as one could have known of the other.  So the same books are kept
as for a simulated federation, and the same invariants checked: S1 to S6, and of S10 what journals
can show, which is not every update that had been delivered.

A site that lost its disk has a second journal that knows nothing of the first.  What it announced
still counts; what it merged and committed belongs to the disk, for its models went with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from lightyear_node.barrier import Cause, Decision
from lightyear_node.journal import Record
from lightyear_node.records import PeerName, Reason, Round, Update
from tests.sim.referee import InvariantBroken, Referee

KINDS = ("seal", "decision", "commit")
DELIVERED_UNSEEN = (Reason.STALE_ROUND, Reason.PROBATION, Reason.UNCONFIRMED)
"""With these a peer may have delivered and was not judged; its line does not say what."""


@dataclass(frozen=True, slots=True)
class Federated:
    """What all sites have agreed on that the referee must know."""

    sites: frozenset[PeerName]
    min_peers: int
    faulty_max: int


@dataclass(slots=True)
class _Disk:
    """One journal, as far as it has been read."""

    site: PeerName
    name: PeerName
    """Its own in the referee's books."""
    generation: int = -1
    sealed: int = -1
    committed: int = -1


def replay(agreed: Federated, journals: Mapping[PeerName, Sequence[Sequence[Record]]]) -> Referee:
    """Raise `InvariantBroken` at the first record that cannot be.

    Each site has its journals in the order of its disks.  Sites without any may have announced
    whatever others say of them.
    """
    disks = [
        (_Disk(site, PeerName(f"{site} on disk {number}" if number else site)), records)
        for site, lives in journals.items()
        for number, records in enumerate(lives)
    ]
    names = [disk.name for disk, _ in disks]
    referee = Referee(sorted(agreed.sites), names, agreed.min_peers, agreed.faulty_max)
    reading = _Reading(agreed, journals.keys(), referee)
    for disk, record in _in_order(disks):
        reading.read(disk, record)
    return referee


def _in_order(disks: Sequence[tuple[_Disk, Sequence[Record]]]) -> Iterator[tuple[_Disk, Record]]:
    found: list[tuple[int, str, int, _Disk, Record]] = []
    for disk, records in disks:
        before = 0
        for record in records:
            if record.lamport <= before:
                text = f"{disk.name} has stamp {record.lamport} after {before}"
                raise InvariantBroken("Lamport's order", text)
            before = record.lamport
            if record.kind in KINDS:
                found.append((record.lamport, disk.name, record.seq, disk, record))
    # Records with the same stamp cannot have known of each other, so that any order will do.
    found.sort(key=lambda one: one[:3])
    return ((disk, record) for *_, disk, record in found)


class _Reading:
    def __init__(self, agreed: Federated, known: Set[PeerName], referee: Referee) -> None:
        self._agreed = agreed
        self._strangers = agreed.sites - known
        """Sites whose journals are not here: they may have announced anything."""
        self._referee = referee
        self._reached = dict.fromkeys(known, -1)
        """The highest round that each site has sealed so far."""

    def read(self, disk: _Disk, record: Record) -> None:
        match record.kind:
            case "seal":
                self._seal(disk, Update(**record.body["update"]))
            case "decision":
                self._decide(disk, record.body)
            case "commit":
                self._referee.commits(disk.name, Round(record.round))
                disk.committed = record.round

    def _seal(self, disk: _Disk, update: Update) -> None:
        round, site = update.round, disk.site
        if update.peer != site:
            raise InvariantBroken("S3", f"{disk.name} seals {update}, which is not its own")
        self._referee.shows(site, update)
        is_next = round == disk.committed + 1
        # Without its memory it goes on behind all that it is known to have announced.
        is_next |= update.generation > disk.generation and round <= self._reached[site] + 1
        vouchers = self._beyond(site, round - 1)
        if not is_next and vouchers <= self._agreed.faulty_max:
            text = f"{disk.name} jumps to round {round} with {vouchers} vouchers"
            raise InvariantBroken("S10", text)
        disk.generation, disk.sealed = update.generation, round
        self._reached[site] = max(self._reached[site], round)

    def _decide(self, disk: _Disk, body: Mapping[str, Any]) -> None:
        round, accepted = body["round"], tuple(Update(**update) for update in body["accepted"])
        if round != disk.sealed:
            text = f"{disk.name} decides round {round} after sealing {disk.sealed}"
            raise InvariantBroken("S5", text)
        if disk.site in {update.peer for update in accepted}:
            raise InvariantBroken("S3", f"{disk.name} merges its own update as another's")
        delivered = sum(
            line["digest"] is not None or line["reason"] in DELIVERED_UNSEEN
            for line in body["verdicts"]
        )
        beyond = self._beyond(disk.site, round)
        if delivered < self._agreed.min_peers and beyond <= self._agreed.faulty_max:
            text = f"with {delivered} delivered and {beyond} beyond it"
            raise InvariantBroken("S10", f"{disk.name} closes round {round} {text}")
        cause = Cause(body["cause"])
        self._referee.merges(disk.name, Decision(round, cause, body["why"], accepted, ()))

    def _beyond(self, site: PeerName, round: int) -> int:
        """How many others have, or may have, announced something later than this round."""
        known = sum(reached > round for peer, reached in self._reached.items() if peer != site)
        return known + len(self._strangers)
