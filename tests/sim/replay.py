"""Checks the journals of real sites with the simulator's invariant checker.

A journal records what its site announced, decided and committed; the wall clock, which the sites of
one machine share, orders these records across sites.  So the same invariants are checked as for a
simulated federation: S1 to S7, and those parts of S10 and probation that journals can show.
Journals do not show when a site heard of what; it may have known all that was recorded before.

A site that lost its disk has a second journal that does not continue the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightyear_node.protocol.durable_state import Decision, DurableState
from lightyear_node.protocol.events import Announced, Answered
from lightyear_node.protocol.parameters import Cause, Parameters
from lightyear_node.protocol.state_machine import Barrier
from lightyear_node.storage.hash_chain import Record
from lightyear_node.types import ROUND_MAX, Digest, Generation, PeerName, Reason, Round, Update
from tests.sim.invariant_checker import InvariantBroken, InvariantChecker

KINDS = ("seal", "decision", "commit", "evidence", "blocked", "pardon", "rollback")
DELIVERED_UNSEEN = (Reason.STALE_ROUND, Reason.PROBATION, Reason.UNCONFIRMED)
"""Reasons with which a peer may have delivered an update that was not judged."""


@dataclass(slots=True)
class _Disk:
    """One journal, as far as it has been read."""

    site: PeerName
    number: int
    has_other_members: bool
    sealed: int = -1


def replay(
    parameters: Parameters, journals: Mapping[PeerName, Sequence[Sequence[Record]]]
) -> InvariantChecker:
    """Raise `InvariantBroken` at the first record that violates an invariant.

    Each site has its journals in the order of its disks; `terms` are those of the first site.
    Sites without a journal may have announced anything.
    """
    running = _Replay(parameters, list(journals))
    for disk, record in _in_order(journals):
        running.read(disk, record)
    return running.checker


def _in_order(
    journals: Mapping[PeerName, Sequence[Sequence[Record]]],
) -> Iterator[tuple[_Disk, Record]]:
    """Order records by wall time: what a site could have known was recorded before."""
    found: list[tuple[int, str, int, _Disk, Record]] = []
    for site, disks in journals.items():
        before = 0
        for number, records in enumerate(disks):
            kinds = {record.kind for record in records}
            disk, last = _Disk(site, number, "members" in kinds), 0
            for record in records:
                # A new disk starts empty, and hears of the others before it seals.
                before = max(before, last) if record.kind in KINDS else last
                if record.wall_ns < before:
                    text = f"{site} records at {record.wall_ns} after {before}"
                    raise InvariantBroken("time", text)
                last = record.wall_ns
                if record.kind in KINDS:
                    found.append((record.wall_ns, site, record.seq, disk, record))
    found.sort(key=lambda one: one[:3])
    return ((disk, record) for *_, disk, record in found)


class _Replay:
    def __init__(self, parameters: Parameters, known: list[PeerName]) -> None:
        self._parameters = parameters
        self._sites = sorted(parameters.peers.union(known))
        self._known = known
        self._signed: set[Update] = set()
        self._disks = dict.fromkeys(known, 0)
        self._barriers: dict[PeerName, Barrier] = {}
        """They only hold each site's round for the checker."""
        self._newest: dict[PeerName, Update] = {}
        self.checker = InvariantChecker(self._sites, known, parameters, self._signed)
        for site in known:
            self._boot(site)

    def read(self, disk: _Disk, record: Record) -> None:
        if disk.number > self._disks[disk.site]:
            self._disks[disk.site] = disk.number
            self.checker.loses_disk(disk.site)
            self._boot(disk.site)
        self._barriers[disk.site].round = Round(record.round)
        match record.kind:
            case "seal":
                self._seal(disk, Update(**record.body["update"]))
            case "decision":
                self._decide(disk, record.body)
            case "commit":
                self.checker.commits(disk.site, Round(record.round))
            case "evidence":
                first, second = (
                    Update(**record.body[which]["manifest"]["update"])
                    for which in ("first", "second")
                )
                self._accept_unrecorded(first, second)
                self.checker.accuses(disk.site, first, second)
            case _:
                self.checker.notes(disk.site, record.kind, record.body)

    def _boot(self, site: PeerName) -> None:
        parameters = replace(self._parameters, peers=frozenset(self._sites) - {site})
        self._barriers[site] = Barrier(site, parameters, DurableState(Generation(0), Round(0)))
        self.checker.boots(site, self._barriers[site], parameters)
        for peer in parameters.peers:
            self.checker.receives(site, Answered(peer, self._newest.get(site)))
        for update in self._newest.values():
            self._announce_to(site, update)
        for stranger in set(self._sites).difference(self._known):
            anything = Update(stranger, Generation(0), Round(ROUND_MAX), Digest(""))
            self._announce_to(site, anything)

    def _announce_to(self, site: PeerName, update: Update) -> None:
        if update.peer != site:
            self.checker.receives(site, Announced(update))

    def _seal(self, disk: _Disk, update: Update) -> None:
        site = disk.site
        if update.peer != site:
            raise InvariantBroken("S3", f"{site} seals {update}, which is not its own")
        self._signed.add(update)
        self.checker.persists(site, DurableState(update.generation, update.round, announced=update))
        self.checker.announces(site, update, ())
        self.checker.signs(site, update)
        disk.sealed = update.round
        self._newest[site] = update
        for other in self._known:
            self._announce_to(other, update)

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
        # With other members another number of peers was needed.
        enough = disk.has_other_members or delivered >= self._parameters.min_peers
        if not enough and beyond <= self._parameters.faulty_max:
            text = f"with {delivered} delivered and {beyond} beyond it"
            raise InvariantBroken("S10", f"{site} closes round {round} {text}")
        self._accept_unrecorded(*accepted)
        decision = Decision(round, Cause(body["cause"]), body["why"], accepted, ())
        self.checker.decides(site, decision)
        self.checker.merges(site, decision)

    def _accept_unrecorded(self, *updates: Update) -> None:
        """Accept updates of sites without a journal as signed."""
        self._signed.update(update for update in updates if update.peer not in self._known)

    def _beyond(self, site: PeerName, round: int) -> int:
        """Count the others that have, or may have, announced a later round."""
        others = [update for peer, update in self._newest.items() if peer != site]
        return sum(u.round > round for u in others) + len(self._sites) - len(self._known)
