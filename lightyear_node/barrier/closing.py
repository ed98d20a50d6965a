"""When the round being collected may close, and what it still waits for.

Never for time alone: without `min_peers` delivered, and without faulty_max + 1 peers beyond it, a
round stays open however long it takes.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightyear_node.barrier.patience import Patience
from lightyear_node.barrier.terms import Cause, Terms
from lightyear_node.barrier.view import View
from lightyear_node.records import PeerName, Round

# The alarm repeats ever more slowly, up to this many times its first waiting time.
DEGRADED_BACKOFF = 1.5
DEGRADED_BACKOFF_MAX = 4.0
# How many heartbeats the other sites get to vouch for what is here already.
CONFIRMING_HEARTBEATS = 3


class Closing:
    def __init__(self, terms: Terms, view: View) -> None:
        self.terms = terms
        self._view = view
        self._patience = Patience(terms.grace_min_s, terms.grace_s)
        self._quorum_since: float | None = None
        self._overtaken_since: float | None = None
        self._complete_since: float | None = None
        self._alarm_wait_s = terms.degraded_s
        self._alarm_at = 0.0

    def reform(self, terms: Terms) -> None:
        self.terms = terms
        self._patience.reform(terms.grace_min_s, terms.grace_s, terms.peers)

    def open(self, now: float) -> None:
        """A round begins to be collected."""
        self._quorum_since = self._overtaken_since = self._complete_since = None
        self._alarm_wait_s = self.terms.degraded_s
        self._alarm_at = now + self._alarm_wait_s

    def arrived(self, peer: PeerName, now: float) -> None:
        late_s = now - self._quorum_since if self._quorum_since is not None else 0.0
        self._patience.arrived(peer, late_s)

    def due(self, round: Round, now: float) -> tuple[Cause, str] | None:
        """Which rule closes the round now, in words; None while it stays open."""
        view = self._view
        delivered, awaited = view.delivered(round), view.awaited(round, now)
        missing = [peer for peer in view.peers if peer not in delivered]
        share = f"{len(delivered)} of {len(view.peers)}"
        quorum = len(delivered) >= self.terms.min_peers
        complete = quorum and not awaited
        overtaken = view.supported() > round
        self._quorum_since = _since(self._quorum_since, quorum, now)
        self._overtaken_since = _since(self._overtaken_since, overtaken, now)
        self._complete_since = _since(self._complete_since, complete or overtaken, now)

        if not view.peers:
            return Cause.ALL, "this site trains alone"
        if self._is_confirming(round, now):
            return None
        if complete and not missing:
            return Cause.ALL, f"all {count(len(delivered), 'peer')} delivered"
        if complete:
            words = [f"{peer} is {view.standing(peer, round, now)}" for peer in missing]
            return Cause.ALL, f"nobody to wait for with {share}; {listed(words)}"
        over = self._what_is_over(round, awaited, now)
        if over is not None:
            return Cause.GRACE, f"{over} over with {share}; missing {listed(missing)}"
        if overtaken and not self._is_still_arriving(round, now):
            beyond = view.beyond(round)
            are = "is" if beyond == 1 else "are"
            return Cause.OVERTAKEN, f"overtaken: {count(beyond, 'peer')} {are} beyond round {round}"
        return None

    def close(self, cause: Cause, round: Round, now: float) -> list[PeerName]:
        """The round is over; says who is there and was not waited for any longer."""
        left_out = self._view.awaited(round, now) if cause is Cause.GRACE else []
        waited_s = now - self._quorum_since if self._quorum_since is not None else 0.0
        for peer in left_out:
            self._patience.left_out(peer, waited_s)
        if cause is Cause.GRACE:
            self._view.pass_over_the_unknown()
        self._quorum_since = None  # whatever comes from now on is early for the next round
        return left_out

    def complaint(self, round: Round, now: float) -> str | None:
        """Says from time to time that too few updates are here; nothing else is done about it."""
        if self._quorum_since is not None or now < self._alarm_at:
            return None
        longest_s = self.terms.degraded_s * DEGRADED_BACKOFF_MAX
        self._alarm_wait_s = min(self._alarm_wait_s * DEGRADED_BACKOFF, longest_s)
        self._alarm_at = now + self._alarm_wait_s
        return self.words(round, now)

    def words(self, round: Round, now: float) -> str:
        """Whom we are waiting for."""
        view = self._view
        delivered, awaited = view.delivered(round), view.awaited(round, now)
        here = f"{len(delivered)} of at least {count(self.terms.min_peers, 'update')} here"
        if self._quorum_since is None:
            absent = [peer for peer in view.peers if peer not in {*delivered, *view.excluded}]
            if not absent:
                return f"too few sites are left to wait for ({here})"
            return f"waiting for {listed(absent)} ({here})"
        if not awaited:
            return f"waiting for others to confirm what is here ({here})"
        waited_s, grace_s = now - self._quorum_since, self._patience.grace_for(awaited)
        if waited_s < grace_s:
            return f"waiting for {listed(awaited)} ({here}; closing in {grace_s - waited_s:.0f} s)"
        left_s = max(0.0, self.terms.deadline_s - waited_s)
        closing = f"still making progress; closing in {left_s:.0f} s at the latest"
        return f"waiting for {listed(awaited)} ({here}; {closing})"

    def _is_confirming(self, round: Round, now: float) -> bool:
        """Whether others may still vouch for what is here, once there is nothing else to do."""
        confirming_s = CONFIRMING_HEARTBEATS * self.terms.heartbeat_s
        if self._complete_since is None or now - self._complete_since >= confirming_s:
            return False
        return bool(self._view.unconfirmed(round, now))

    def _what_is_over(self, round: Round, awaited: list[PeerName], now: float) -> str | None:
        """The grace or the deadline, for those who are missing when there is a quorum."""
        if self._quorum_since is None:
            return None
        waited_s = now - self._quorum_since
        if waited_s < self._patience.grace_for(awaited):
            return None
        # The slowest site may be the largest: it is not dropped while it makes progress.
        patient = self.terms.deadline_s > self.terms.grace_s
        progressing = self._view.progressing(round, now) if patient else []
        if not progressing:
            return "grace"
        if waited_s < self.terms.deadline_s:
            return None
        self._view.lose_patience(progressing)
        return "deadline"

    def _is_still_arriving(self, round: Round, now: float) -> bool:
        """What is on its way may still arrive, or a slow site would never merge anything."""
        since = self._overtaken_since
        late = since is not None and now - since >= self.terms.grace_s
        return self._view.arriving(round) and not late


def _since(since: float | None, holds: bool, now: float) -> float | None:
    """Since when a condition has held without a break."""
    if not holds:
        return None
    return now if since is None else since


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last
