"""What a site knows about its peers, and what follows from it.

Every table has at most one slot per peer.  The round is an argument: this class does not know the
state of our own round.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

from lightyear_node.protocol.durable_state import Age, DurableState
from lightyear_node.protocol.echo_votes import EchoVotes
from lightyear_node.protocol.parameters import Parameters, Phase, Standing
from lightyear_node.protocol.record_quota import RecordQuota
from lightyear_node.types import ROUND_MAX, Generation, PeerName, Reason, Round, Update

WORKING = frozenset({Phase.TRAINING, Phase.SEALING, Phase.JUDGING, Phase.MERGING})
"""Phases in which a site is busy computing."""
NEVER: Age = (Generation(-1), Round(-1))
DOUBLINGS_MAX = 10
"""Limit of the accepted updates that a peer owes after wasted extensions: 2**10."""
EVIDENCE_ROUNDS = 100
"""Evidence older than this many rounds is ignored: it can do no more harm, and an old accident must
not count for ever."""

Provable = Callable[[Update], bool]
"""Whether the signature of an update is still stored, so it can serve as evidence."""


@dataclass(frozen=True, slots=True)
class _Failure:
    update: Update
    reason: Reason
    retry_at: float | None  # None: these bytes can never become valid


@dataclass(frozen=True, slots=True)
class _Activity:
    """The phase and progress that a peer reports, and since when they are unchanged."""

    phase: str
    progress: int
    since: float


class PeerTable:
    def __init__(self, parameters: Parameters, memory: DurableState, provable: Provable) -> None:
        self.parameters = parameters
        self._provable = provable
        self.peers = tuple(sorted(parameters.peers))
        # Durable.
        self.blocked = memory.blocked
        self.removed: frozenset[PeerName] = frozenset()
        self.used = dict(memory.used)
        self.generations = dict(memory.generations)
        self.quarantined = dict(memory.quarantined)
        self.unquarantined = dict(memory.unquarantined)
        self.echo_votes = EchoVotes(memory.vouched)
        self.unrecorded = False
        self.quota = RecordQuota()
        # Learned again after every start.
        self._heard_at: dict[PeerName, float] = {}
        self._activity: dict[PeerName, _Activity] = {}
        self._latest: dict[PeerName, Update] = {}
        self._fetching: dict[PeerName, Update] = {}
        self._failed: dict[PeerName, _Failure] = {}
        self._held: dict[PeerName, Update] = {}
        self._not_awaited: set[PeerName] = set()
        self._extensions_lost: dict[PeerName, tuple[int, int]] = {}
        """How often an extension for a peer was wasted, and how many accepted updates it owes."""

    # Changes.

    def reconfigure(self, parameters: Parameters, removed: frozenset[PeerName]) -> None:
        """Use other parameters, possibly with other members."""
        self.parameters, self.removed = parameters, removed
        self.peers = tuple(sorted(parameters.peers))
        self.echo_votes.keep_reports_of(self.peers)
        tables: tuple[dict[PeerName, Any], ...] = (
            self._heard_at,
            self._activity,
            self._latest,
            self._fetching,
            self._failed,
            self._held,
            self._extensions_lost,
        )
        for table in tables:
            for peer in table.keys() - parameters.peers:
                del table[peer]
        self._not_awaited &= parameters.peers
        self.quota.keep_only(parameters.peers)

    def mark_alive(self, peer: PeerName, now: float) -> None:
        if peer in self.parameters.peers:
            self._heard_at[peer] = now

    def note_activity(self, peer: PeerName, phase: str, progress: int, now: float) -> None:
        if peer not in self.parameters.peers:
            return
        before = self._activity.get(peer)
        unchanged = before is not None and (before.phase, before.progress) == (phase, progress)
        if not unchanged:
            self._activity[peer] = _Activity(phase, progress, now)

    def settle_extensions(self, waited_for: Set[PeerName], accepted: Set[PeerName]) -> None:
        """Stop extending the grace period for peers whose extension was wasted.

        An extension is wasted if no update of the peer was accepted afterwards.  The peer earns
        extensions again with accepted updates, twice as many after every wasted one.
        """
        for peer in waited_for - accepted:
            failures, _ = self._extensions_lost.get(peer, (0, 0))
            self._extensions_lost[peer] = (failures + 1, 2 ** min(failures, DOUBLINGS_MAX))
        for peer in accepted & self._extensions_lost.keys():
            failures, owed = self._extensions_lost[peer]
            self._extensions_lost[peer] = (failures, max(0, owed - 1))

    def learn(self, update: Update, round: Round, now: float) -> tuple[Update, Update] | None:
        """Note an update that a peer signed, from any source; returns two that contradict."""
        peer = update.peer
        if peer not in self.parameters.peers or not 0 <= update.round <= ROUND_MAX:
            return None
        # Evidence up to an unquarantine is ignored, so updates up to it are not used either.
        if peer in self.quarantined or update.age <= self.unquarantined.get(peer, NEVER):
            return None
        known = self._contradiction(update)
        if known is not None:
            return known, update
        newest = self._latest.get(peer)
        if newest is not None and update.age < newest.age:
            return None
        if update.generation < self.generations.get(peer, NEVER)[0]:
            return None  # sealed before its durable state was lost; void, also after our restart
        if not self._follow_generation(update, round, now):
            return None
        if self.echo_votes.is_news(update) and self.quota.take(peer, now):
            self.echo_votes.vouch(update)
            self.unrecorded = True
        if newest is not None and update.generation > newest.generation:
            self._held.pop(peer, None)
        self._latest[peer] = update
        return None

    def quarantine(self, first: Update, second: Update, round: Round) -> bool:
        """Quarantine a peer; False if nothing changes or the evidence is too old or ignored."""
        peer, age = first.peer, first.age
        if peer not in self.parameters.peers or peer in self.quarantined:
            return False
        if first.round < round - EVIDENCE_ROUNDS:
            return False
        if not (self._provable(first) and self._provable(second)):
            return False
        if age <= self.unquarantined.get(peer, NEVER):
            return False
        self.quarantined[peer] = age
        self._latest.pop(peer, None)
        self._held.pop(peer, None)
        return True

    def unquarantine(self, peer: PeerName) -> bool:
        """Include a peer again; False if it is not quarantined."""
        age = self.quarantined.pop(peer, None)
        if age is None:
            return False
        self.unquarantined[peer] = age
        return True

    def receive(self, update: Update, now: float) -> bool:
        """Note a completed download; whether the update may still be used."""
        peer = update.peer
        if self._fetching.get(peer) != update:
            return False
        del self._fetching[peer]
        self.mark_alive(peer, now)
        newest = self._latest.get(peer)
        if newest is None or update.generation != newest.generation:
            return False
        if update.age <= self.unquarantined.get(peer, NEVER):
            return False
        self._held[peer] = update
        return True

    def fail(self, update: Update, reason: Reason, retry_at: float | None) -> None:
        if self._fetching.get(update.peer) == update:
            del self._fetching[update.peer]
            self._failed[update.peer] = _Failure(update, reason, retry_at)

    def stop_awaiting_unknown(self) -> None:
        """Stop waiting for peers that have never announced an update, until they do."""
        known = self._latest.keys() & self._heard_at.keys()
        self._not_awaited |= self.parameters.peers - known

    def fetch(self, round: Round, now: float) -> list[Update]:
        """The updates to fetch now; they count as being fetched from here on."""
        wanted = [update for peer in self.peers if (update := self._wanted(peer, round, now))]
        self._fetching.update({update.peer: update for update in wanted})
        return wanted

    # Queries.

    @property
    def excluded(self) -> frozenset[PeerName]:
        """Peers that are ignored: blocked, removed or quarantined."""
        return (self.blocked | self.removed | self.quarantined.keys()) & self.parameters.peers

    def is_included(self, peer: PeerName) -> bool:
        return peer in self.parameters.peers and peer not in self.excluded

    def newest(self) -> list[Update]:
        return [update for peer, update in self._latest.items() if peer not in self.excluded]

    def supported_round(self) -> Round:
        """The highest round that faulty_max + 1 peers have reached; -1 if there are too few."""
        reached = sorted((update.round for update in self.newest()), reverse=True)
        needed = self.parameters.faulty_max + 1
        if len(reached) < needed:
            return Round(-1)
        # Sites that have finished stay at the last round.
        return Round(min(reached[needed - 1], self.parameters.rounds - 1))

    def count_beyond(self, round: Round) -> int:
        """How many peers are beyond a round."""
        return sum(update.round > round for update in self.newest())

    def has_delivered(self, peer: PeerName, round: Round) -> bool:
        held = self._held.get(peer)
        return held is not None and held.round >= round and peer not in self.excluded

    def delivered(self, round: Round) -> list[PeerName]:
        return [peer for peer in self.peers if self.has_delivered(peer, round)]

    def unconfirmed(self, round: Round, now: float) -> list[PeerName]:
        """Peers that delivered but lack echo votes; empty if too few live sites could vote."""
        if not self.parameters.echo:
            return []
        voters = [peer for peer in self.peers if self._is_alive(peer, now)]
        voters = [peer for peer in voters if peer not in self.quarantined]
        if 1 + len(voters) < self.parameters.echo_quorum:
            return []
        return [
            peer
            for peer in self.delivered(round)
            if self.unusable(peer, round, now) is Reason.UNCONFIRMED
        ]

    def arriving(self, round: Round) -> bool:
        """Whether an update that this round could use is being fetched."""
        return any(self._is_arriving(peer, round) for peer in self.peers)

    def held(self, peer: PeerName) -> Update:
        return self._held[peer]

    def kept(self, round: Round) -> list[Update]:
        """Updates, complete or partial, that can still be used from `round` on."""
        complete = [update for update in self._held.values() if update.round >= round]
        retried = [
            failure.update for failure in self._failed.values() if failure.retry_at is not None
        ]
        partial = [update for update in retried if update.round >= round]
        return [*complete, *partial, *self._fetching.values()]

    def referenced(self) -> set[Update]:
        """Updates in any table: their signatures may be needed as evidence."""
        tables = (self._latest, self._fetching, self._held)
        updates = {update for table in tables for update in table.values()}
        updates.update(failure.update for failure in self._failed.values())
        return updates.union(self.echo_votes.updates())

    def standing(self, peer: PeerName, round: Round, now: float) -> Standing:
        newest, heard_at = self._latest.get(peer), self._heard_at.get(peer)
        failure, activity = self._failure(peer, round), self._activity.get(peer)
        if peer in self.quarantined:
            return Standing.QUARANTINED
        if peer in self.excluded:
            return Standing.BLOCKED
        if self.has_delivered(peer, round):
            return Standing.DELIVERED
        if failure is not None and failure.retry_at is None:
            return Standing.REFUSED
        if heard_at is not None and not self._is_alive(peer, now):
            return Standing.SILENT
        behind = newest is None or newest.round < round
        if behind and activity is not None and activity.phase == Phase.PAUSED:
            return Standing.PAUSED
        if newest is None or heard_at is None:
            # A site that is starting, or training its first update, gets one whole grace period,
            # and no other before its first announcement.
            if peer not in self._not_awaited:
                return Standing.AWAITED
            return Standing.SILENT if heard_at is None else Standing.LAGGING
        if round - newest.round >= self.parameters.lag_rounds:
            return Standing.LAGGING
        return Standing.AWAITED

    def awaited(self, round: Round, now: float) -> list[PeerName]:
        return [peer for peer in self.peers if self.standing(peer, round, now) is Standing.AWAITED]

    def progressing(self, round: Round, now: float) -> list[PeerName]:
        """Awaited peers that are computing or sending and may get an extension."""
        # Not those on probation: they would not be merged, so restarts must not delay a round.
        return [
            peer
            for peer in self.awaited(round, now)
            if self._may_extend(peer)
            and not self.is_on_probation(peer, round)
            and (self._is_working(peer, now) or self._is_arriving(peer, round))
        ]

    def is_on_probation(self, peer: PeerName, round: Round) -> bool:
        return peer in self.generations and round < self.generations[peer][1]

    def unusable(self, peer: PeerName, round: Round, now: float) -> Reason | None:
        """Why no update of a peer is judged when this round closes; None if one is."""
        failure = self._failure(peer, round)
        match self.standing(peer, round, now):
            case Standing.DELIVERED:
                return self._unmergeable(self._held[peer], round)
            case Standing.QUARANTINED:
                return Reason.QUARANTINED
            case Standing.BLOCKED:
                return Reason.BLOCKED
            case Standing.LAGGING | Standing.PAUSED:
                return Reason.STALE_ROUND
            case Standing.SILENT:
                return Reason.UNREACHABLE
            case Standing.REFUSED | Standing.AWAITED:
                return failure.reason if failure is not None else Reason.TIMEOUT

    def _unmergeable(self, update: Update, round: Round) -> Reason | None:
        """Why an update that counts for the round cannot be merged; None if it can."""
        if self._is_used(update):
            return Reason.STALE_ROUND
        if self.is_on_probation(update.peer, round):
            return Reason.PROBATION
        if not self._is_confirmed(update):
            return Reason.UNCONFIRMED
        return None

    def _contradiction(self, update: Update) -> Update | None:
        newest = self._latest.get(update.peer)
        if newest is not None and newest.age == update.age and newest.digest != update.digest:
            return newest
        return self.echo_votes.contradiction(update)

    def _follow_generation(self, update: Update, round: Round, now: float) -> bool:
        """Record a peer's new generation; False if it has used up its quota."""
        if self.generations.get(update.peer, NEVER)[0] >= update.generation:
            return True
        if not self.quota.take(update.peer, now):
            return False
        known, until = self.generations.get(update.peer, (update.generation, Round(0)))
        if update.generation > known:
            # Its durable state was lost.  A new generation is also the one way to sign a round
            # twice, so it starts on probation.  We may be far behind, hence the maximum.
            until = Round(max(round, update.round) + self.parameters.probation_rounds)
        self.unrecorded = True
        self.generations[update.peer] = (update.generation, until)
        return True

    def _is_alive(self, peer: PeerName, now: float) -> bool:
        heard_at = self._heard_at.get(peer)
        return heard_at is not None and now - heard_at <= self.parameters.suspect_s

    def _may_extend(self, peer: PeerName) -> bool:
        _, owed = self._extensions_lost.get(peer, (0, 0))
        return not owed

    def _is_working(self, peer: PeerName, now: float) -> bool:
        activity = self._activity.get(peer)
        if activity is None or activity.phase not in WORKING:
            return False
        return now - activity.since <= self.parameters.stall_s

    def _is_arriving(self, peer: PeerName, round: Round) -> bool:
        update = self._fetching.get(peer)
        return update is not None and update.round >= round and peer not in self.excluded

    def _is_used(self, update: Update) -> bool:
        return update.age <= self.used.get(update.peer, NEVER)

    def _is_confirmed(self, update: Update) -> bool:
        if not self.parameters.echo:
            return True
        return self.echo_votes.supporters(update, self.quarantined) >= self.parameters.echo_quorum

    def _is_better(self, newest: Update, held: Update) -> bool:
        """Whether to replace the update of a peer that we hold."""
        if self._is_used(held):
            return True
        return self._is_confirmed(newest) and not self._is_confirmed(held)

    def _failure(self, peer: PeerName, round: Round) -> _Failure | None:
        """The failed download of the update that this round needs from a peer, if any."""
        failure, newest = self._failed.get(peer), self._latest.get(peer)
        if failure is None or failure.update != newest or failure.update.round < round:
            return None
        return failure

    def _wanted(self, peer: PeerName, round: Round, now: float) -> Update | None:
        """The newest update of a peer, if it should be fetched now."""
        newest, held = self._latest.get(peer), self._held.get(peer)
        if newest is None or newest.round < round or newest == held:
            return None
        if peer in self.excluded or peer in self._fetching:
            return None
        if held is not None and held.round >= round and not self._is_better(newest, held):
            return None
        failure = self._failure(peer, round)
        if failure is None:
            return newest
        return newest if failure.retry_at is not None and now >= failure.retry_at else None
