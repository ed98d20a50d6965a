"""What a site knows of the others, and what may be concluded from it.

Every table has at most one slot per peer.  The round is an argument: the view does not know what
this site is doing about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightyear_node.barrier.memory import Age, Memory
from lightyear_node.barrier.terms import Phase, Standing, Terms
from lightyear_node.barrier.testimony import Testimony
from lightyear_node.records import ROUND_MAX, Generation, PeerName, Reason, Round, Update

WORKING = frozenset({Phase.TRAINING, Phase.SEALING, Phase.JUDGING, Phase.MERGING})
"""In which a site is busy with its model; it cannot be ready sooner."""
NEVER: Age = (Generation(-1), Round(-1))


@dataclass(frozen=True, slots=True)
class _Failure:
    update: Update
    reason: Reason
    retry_at: float | None  # None: these very bytes will never be right


@dataclass(frozen=True, slots=True)
class _Doing:
    """What a peer says that it does, and when it last made progress with it."""

    phase: str
    progress: int
    since: float


class View:
    def __init__(self, terms: Terms, memory: Memory) -> None:
        self.terms = terms
        self.peers = tuple(sorted(terms.peers))
        # What is remembered of a peer, for as long as this site exists.
        self.blocked = memory.blocked
        self.gone: frozenset[PeerName] = frozenset()
        self.used = dict(memory.used)
        self.generations = dict(memory.generations)
        self.quarantined = dict(memory.quarantined)
        self.pardoned = dict(memory.pardoned)
        self.testimony = Testimony(memory.vouched)
        self.unrecorded = False
        # What is learned again after every start.
        self._heard_at: dict[PeerName, float] = {}
        self._doing: dict[PeerName, _Doing] = {}
        self._latest: dict[PeerName, Update] = {}
        self._fetching: dict[PeerName, Update] = {}
        self._failed: dict[PeerName, _Failure] = {}
        self._held: dict[PeerName, Update] = {}
        self._passed_over: set[PeerName] = set()
        self._tried_patience: set[PeerName] = set()

    # What happens.

    def reform(self, terms: Terms, gone: frozenset[PeerName]) -> None:
        """Other terms, and maybe other members."""
        self.terms, self.gone = terms, gone
        self.peers = tuple(sorted(terms.peers))
        self.testimony.forget_reports_but_of(self.peers)
        tables: tuple[dict[PeerName, Any], ...] = (
            self._heard_at,
            self._doing,
            self._latest,
            self._fetching,
            self._failed,
            self._held,
        )
        for table in tables:
            for peer in table.keys() - terms.peers:
                del table[peer]
        self._passed_over &= terms.peers
        self._tried_patience &= terms.peers

    def hear(self, peer: PeerName, now: float) -> None:
        if peer in self.terms.peers:
            self._heard_at[peer] = now

    def note_work(self, peer: PeerName, phase: str, progress: int, now: float) -> None:
        if peer not in self.terms.peers:
            return
        before = self._doing.get(peer)
        stuck = before is not None and (before.phase, before.progress) == (phase, progress)
        if not stuck:
            self._doing[peer] = _Doing(phase, progress, now)

    def lose_patience(self, peers: list[PeerName]) -> None:
        """Whoever was waited for until the deadline gets no more than a grace until it delivers."""
        self._tried_patience.update(peers)

    def learn(self, update: Update, round: Round) -> tuple[Update, Update] | None:
        """A peer has signed this, whoever told us; two that contradict each other are returned."""
        peer = update.peer
        if peer not in self.terms.peers or not 0 <= update.round <= ROUND_MAX:
            return None
        # What an operator has forgiven is no evidence, and for that it is not used either.
        if peer in self.quarantined or update.age <= self.pardoned.get(peer, NEVER):
            return None
        known = self._contradiction(update)
        if known is not None:
            return known, update
        newest = self._latest.get(peer)
        if newest is not None and update.age <= newest.age:
            return None
        if update.generation < self.generations.get(peer, NEVER)[0]:
            return None  # what was sealed by a lost memory is void, also after we have restarted
        self._follow_generation(update, round)
        self.unrecorded |= self.testimony.vouch(update)
        if newest is not None and update.generation > newest.generation:
            self._held.pop(peer, None)
        self._latest[peer] = update
        return None

    def quarantine(self, peer: PeerName, age: Age) -> bool:
        """Whether that is news; what an operator has forgiven is not."""
        if peer not in self.terms.peers or peer in self.quarantined:
            return False
        if age <= self.pardoned.get(peer, NEVER):
            return False
        self.quarantined[peer] = age
        self._latest.pop(peer, None)
        self._held.pop(peer, None)
        return True

    def pardon(self, peer: PeerName) -> bool:
        age = self.quarantined.pop(peer, None)
        if age is None:
            return False
        self.pardoned[peer] = age
        return True

    def receive(self, update: Update, now: float) -> bool:
        """Whether this is a peer's update that we did not have and may still use."""
        peer = update.peer
        if self._fetching.get(peer) != update:
            return False
        del self._fetching[peer]
        self.hear(peer, now)
        newest = self._latest.get(peer)
        if newest is None or update.generation != newest.generation:
            return False
        if update.age <= self.pardoned.get(peer, NEVER):
            return False
        self._held[peer] = update
        self._tried_patience.discard(peer)
        return True

    def fail(self, update: Update, reason: Reason, retry_at: float | None) -> None:
        if self._fetching.get(update.peer) == update:
            del self._fetching[update.peer]
            self._failed[update.peer] = _Failure(update, reason, retry_at)

    def pass_over_the_unknown(self) -> None:
        """Wait no longer for peers that have never told us anything, as long as they do not."""
        told_us = self._latest.keys() & self._heard_at.keys()
        self._passed_over |= self.terms.peers - told_us

    def fetch(self, round: Round, now: float) -> list[Update]:
        """The updates to fetch now; they count as on their way from here on."""
        wanted = [update for peer in self.peers if (update := self._wanted(peer, round, now))]
        self._fetching.update({update.peer: update for update in wanted})
        return wanted

    # What follows.

    @property
    def excluded(self) -> frozenset[PeerName]:
        """Those who are as if they were not there."""
        return (self.blocked | self.gone | self.quarantined.keys()) & self.terms.peers

    def is_welcome(self, peer: PeerName) -> bool:
        return peer in self.terms.peers and peer not in self.excluded

    def newest(self) -> list[Update]:
        return [update for peer, update in self._latest.items() if peer not in self.excluded]

    def supported(self) -> Round:
        """The highest round that so many peers have reached that one of them is honest."""
        reached = sorted((update.round for update in self.newest()), reverse=True)
        vouchers = self.terms.faulty_max + 1
        if len(reached) < vouchers:
            return Round(-1)
        # Sites that are done stay at the last round, and that is where we meet them.
        return Round(min(reached[vouchers - 1], self.terms.rounds - 1))

    def beyond(self, round: Round) -> int:
        """How many peers have passed a round."""
        return sum(update.round > round for update in self.newest())

    def has_delivered(self, peer: PeerName, round: Round) -> bool:
        held = self._held.get(peer)
        return held is not None and held.round >= round and peer not in self.excluded

    def delivered(self, round: Round) -> list[PeerName]:
        return [peer for peer in self.peers if self.has_delivered(peer, round)]

    def unconfirmed(self, round: Round, now: float) -> list[PeerName]:
        """Whose updates are here and need only be vouched for by more sites, if enough are left."""
        if not self.terms.echo:
            return []
        witnesses = [peer for peer in self.peers if self._is_alive(peer, now)]
        witnesses = [peer for peer in witnesses if peer not in self.quarantined]
        if 1 + len(witnesses) < self.terms.echo_quorum:
            return []
        return [
            peer
            for peer in self.delivered(round)
            if self.unusable(peer, round, now) is Reason.UNCONFIRMED
        ]

    def arriving(self, round: Round) -> bool:
        """Whether anything is on its way that this round could use."""
        return any(self._is_arriving(peer, round) for peer in self.peers)

    def held(self, peer: PeerName) -> Update:
        return self._held[peer]

    def kept(self, round: Round) -> list[Update]:
        """What is here or on its way, or half here, and can still be of use from `round` on."""
        here = [update for update in self._held.values() if update.round >= round]
        tried = [
            failure.update for failure in self._failed.values() if failure.retry_at is not None
        ]
        here += [update for update in tried if update.round >= round]
        return here + list(self._fetching.values())

    def standing(self, peer: PeerName, round: Round, now: float) -> Standing:
        newest, heard_at = self._latest.get(peer), self._heard_at.get(peer)
        failure, doing = self._failure(peer, round), self._doing.get(peer)
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
        if behind and doing is not None and doing.phase == Phase.PAUSED:
            return Standing.PAUSED
        if newest is None or heard_at is None:
            # A site that is still starting up, or training its first update, is given one whole
            # grace period, and no more after that before it has announced something.
            if peer not in self._passed_over:
                return Standing.AWAITED
            return Standing.SILENT if heard_at is None else Standing.LAGGING
        if round - newest.round >= self.terms.lag_rounds:
            return Standing.LAGGING
        return Standing.AWAITED

    def awaited(self, round: Round, now: float) -> list[PeerName]:
        return [peer for peer in self.peers if self.standing(peer, round, now) is Standing.AWAITED]

    def progressing(self, round: Round, now: float) -> list[PeerName]:
        """Those of the awaited who are seen to work or to send, and may be believed."""
        # Who is on probation would not be merged: one that is reborn all the time holds up nobody.
        return [
            peer
            for peer in self.awaited(round, now)
            if peer not in self._tried_patience
            and not self.is_on_probation(peer, round)
            and (self._is_working(peer, now) or self._is_arriving(peer, round))
        ]

    def is_on_probation(self, peer: PeerName, round: Round) -> bool:
        return peer in self.generations and round < self.generations[peer][1]

    def unusable(self, peer: PeerName, round: Round, now: float) -> Reason | None:
        """Why nothing of a peer is judged when this round closes; None if something is."""
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
        """Why an update that counts for the round is not merged."""
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
        return self.testimony.contradiction(update)

    def _follow_generation(self, update: Update, round: Round) -> None:
        known, until = self.generations.get(update.peer, (update.generation, Round(0)))
        if update.generation > known:
            # It had to begin without its memory.  That is also the one way to sign a round twice,
            # and so it is not merged for a while.  We may be far behind, and about to catch up.
            until = Round(max(round, update.round) + self.terms.probation_rounds)
        self.unrecorded |= self.generations.get(update.peer, NEVER)[0] < update.generation
        self.generations[update.peer] = (max(known, update.generation), until)

    def _is_alive(self, peer: PeerName, now: float) -> bool:
        heard_at = self._heard_at.get(peer)
        return heard_at is not None and now - heard_at <= self.terms.suspect_s

    def _is_working(self, peer: PeerName, now: float) -> bool:
        doing = self._doing.get(peer)
        if doing is None or doing.phase not in WORKING:
            return False
        return now - doing.since <= self.terms.stall_s

    def _is_arriving(self, peer: PeerName, round: Round) -> bool:
        update = self._fetching.get(peer)
        return update is not None and update.round >= round and peer not in self.excluded

    def _is_used(self, update: Update) -> bool:
        return update.age <= self.used.get(update.peer, NEVER)

    def _is_confirmed(self, update: Update) -> bool:
        if not self.terms.echo:
            return True
        return self.testimony.supporters(update, self.quarantined) >= self.terms.echo_quorum

    def _is_better(self, newest: Update, held: Update) -> bool:
        """Whether a round that has one update of a peer is better off with another."""
        if self._is_used(held):
            return True
        return self._is_confirmed(newest) and not self._is_confirmed(held)

    def _failure(self, peer: PeerName, round: Round) -> _Failure | None:
        """How fetching the update that this round needs of a peer has failed, if it has."""
        failure, newest = self._failed.get(peer), self._latest.get(peer)
        if failure is None or failure.update != newest or failure.update.round < round:
            return None
        return failure

    def _wanted(self, peer: PeerName, round: Round, now: float) -> Update | None:
        """The newest update of a peer, if the round lacks one that it could merge."""
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
