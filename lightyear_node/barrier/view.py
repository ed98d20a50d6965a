"""What a site knows of the others, and what may be concluded from it.

Every table has at most one slot per peer.  The round is an argument: the view does not know what
this site is doing about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightyear_node.barrier.records import Age, Standing, Terms
from lightyear_node.records import ROUND_MAX, Generation, PeerName, Reason, Round, Update

NEVER: Age = (Generation(-1), Round(-1))


@dataclass(frozen=True, slots=True)
class _Failure:
    update: Update
    reason: Reason
    retry_at: float | None  # None: these very bytes will never be right


class View:
    def __init__(
        self, terms: Terms, used: Mapping[PeerName, Age], excluded: frozenset[PeerName]
    ) -> None:
        self.terms = terms
        self.peers = tuple(sorted(terms.peers))
        # Those an operator has blocked; those caught lying will join them.
        self.excluded = excluded
        self.used = dict(used)
        self._heard_at: dict[PeerName, float] = {}
        self._latest: dict[PeerName, Update] = {}
        self._fetching: dict[PeerName, Update] = {}
        self._failed: dict[PeerName, _Failure] = {}
        self._held: dict[PeerName, Update] = {}
        self._passed_over: set[PeerName] = set()
        self._at_work: set[PeerName] = set()
        self._tried_patience: set[PeerName] = set()

    # What happens.

    def hear(self, peer: PeerName, now: float) -> None:
        if peer in self.terms.peers:
            self._heard_at[peer] = now

    def note_work(self, peer: PeerName, at_work: bool) -> None:
        if at_work and peer in self.terms.peers:
            self._at_work.add(peer)
        else:
            self._at_work.discard(peer)

    def lose_patience(self, peers: list[PeerName]) -> None:
        """Whoever was waited for until the deadline gets no more than a grace until it delivers."""
        self._tried_patience.update(peers)

    def learn(self, update: Update, now: float) -> None:
        peer = update.peer
        if peer not in self.terms.peers or not 0 <= update.round <= ROUND_MAX:
            return
        self.hear(peer, now)
        newest = self._latest.get(peer)
        # An equal age with another digest is equivocation: its evidence will be taken here.
        if newest is not None and update.age <= newest.age:
            return
        if newest is not None and update.generation > newest.generation:
            # The peer has lost its disk: what it sealed before is void.  Probation will begin here.
            self._held.pop(peer, None)
        self._latest[peer] = update

    def receive(self, update: Update, now: float) -> None:
        peer = update.peer
        if self._fetching.get(peer) != update:
            return
        del self._fetching[peer]
        self.hear(peer, now)
        if update.generation == self._latest[peer].generation:
            self._held[peer] = update
            self._tried_patience.discard(peer)

    def fail(self, update: Update, reason: Reason, retry_at: float | None) -> None:
        if self._fetching.get(update.peer) == update:
            del self._fetching[update.peer]
            self._failed[update.peer] = _Failure(update, reason, retry_at)

    def pass_over_the_unknown(self) -> None:
        """Wait no longer for peers that have never announced anything, as long as they do not."""
        self._passed_over |= self.terms.peers - self._latest.keys()

    def fetch(self, round: Round, now: float) -> list[Update]:
        """The updates to fetch now; they count as on their way from here on."""
        wanted = [update for peer in self.peers if (update := self._wanted(peer, round, now))]
        self._fetching.update({update.peer: update for update in wanted})
        return wanted

    # What follows.

    def supported(self) -> Round:
        """The highest round that so many peers have reached that one of them is honest."""
        reached = sorted(
            (update.round for peer, update in self._latest.items() if peer not in self.excluded),
            reverse=True,
        )
        vouchers = self.terms.faulty_max + 1
        if len(reached) < vouchers:
            return Round(-1)
        # Sites that are done stay at the last round, and that is where we meet them.
        return Round(min(reached[vouchers - 1], self.terms.rounds - 1))

    def beyond(self, round: Round) -> int:
        """How many peers have passed a round."""
        return sum(
            update.round > round and peer not in self.excluded
            for peer, update in self._latest.items()
        )

    def has_delivered(self, peer: PeerName, round: Round) -> bool:
        held = self._held.get(peer)
        return held is not None and held.round >= round and peer not in self.excluded

    def delivered(self, round: Round) -> list[PeerName]:
        return [peer for peer in self.peers if self.has_delivered(peer, round)]

    def arriving(self, round: Round) -> bool:
        """Whether anything is on its way that this round could use."""
        return any(
            update.round >= round and peer not in self.excluded
            for peer, update in self._fetching.items()
        )

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
        failure = self._failure(peer, round)
        if peer in self.excluded:
            return Standing.EXCLUDED
        if self.has_delivered(peer, round):
            return Standing.DELIVERED
        if failure is not None and failure.retry_at is None:
            return Standing.REFUSED
        if heard_at is not None and now - heard_at > self.terms.suspect_s:
            return Standing.SILENT
        if newest is None:
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

    def working(self, round: Round, now: float) -> list[PeerName]:
        """Those of the awaited who say that they are training, and may be believed."""
        believed = self._at_work - self._tried_patience
        return [peer for peer in self.awaited(round, now) if peer in believed]

    def unusable(self, peer: PeerName, round: Round, now: float) -> Reason | None:
        """Why nothing of a peer is judged when this round closes; None if something is."""
        failure = self._failure(peer, round)
        match self.standing(peer, round, now):
            case Standing.DELIVERED:
                # Probation and a missing echo quorum will be reasons here too: such updates count
                # for the barrier and are not merged.
                return Reason.STALE_ROUND if self._is_used(self._held[peer]) else None
            case Standing.EXCLUDED:
                return Reason.BLOCKED
            case Standing.LAGGING:
                return Reason.STALE_ROUND
            case Standing.SILENT:
                return Reason.UNREACHABLE
            case Standing.REFUSED | Standing.AWAITED:
                return failure.reason if failure is not None else Reason.TIMEOUT

    def _failure(self, peer: PeerName, round: Round) -> _Failure | None:
        """How fetching the update that this round needs of a peer has failed, if it has."""
        failure, newest = self._failed.get(peer), self._latest.get(peer)
        if failure is None or failure.update != newest or failure.update.round < round:
            return None
        return failure

    def _is_used(self, update: Update) -> bool:
        return update.age <= self.used.get(update.peer, NEVER)

    def _wanted(self, peer: PeerName, round: Round, now: float) -> Update | None:
        """The newest update of a peer, if the round lacks one that was not merged yet."""
        newest, held = self._latest.get(peer), self._held.get(peer)
        if newest is None or newest.round < round or newest == held:
            return None
        if peer in self.excluded or peer in self._fetching:
            return None
        if held is not None and held.round >= round and not self._is_used(held):
            return None
        failure = self._failure(peer, round)
        if failure is None:
            return newest
        return newest if failure.retry_at is not None and now >= failure.retry_at else None
