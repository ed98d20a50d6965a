"""When a round may close, and what it still waits for.

Time alone never closes a round: it stays open until `min_peers` have delivered or faulty_max + 1
peers are beyond it.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightyear_node.protocol.grace_period import GracePeriod
from lightyear_node.protocol.parameters import Cause, Parameters
from lightyear_node.protocol.peer_table import PeerTable
from lightyear_node.types import PeerName, Round

# Backoff of the repeated alarm, and its limit in multiples of the first interval.
DEGRADED_BACKOFF = 1.5
DEGRADED_BACKOFF_MAX = 4.0
# How many heartbeats to wait for missing echo votes.
CONFIRMING_HEARTBEATS = 3


class RoundClosing:
    def __init__(self, parameters: Parameters, table: PeerTable) -> None:
        self.parameters = parameters
        self._table = table
        self._grace_period = GracePeriod(parameters.grace_min_s, parameters.grace_s)
        self._quorum_since: float | None = None
        self._overtaken_since: float | None = None
        self._complete_since: float | None = None
        self.waited_for: set[PeerName] = set()
        """Peers for which this round stayed open beyond the grace period."""
        self._alarm_wait_s = parameters.degraded_s
        self._alarm_at = 0.0

    def reconfigure(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self._grace_period.reconfigure(parameters.grace_min_s, parameters.grace_s, parameters.peers)

    def open(self, now: float) -> None:
        """Start collecting a round."""
        self._quorum_since = self._overtaken_since = self._complete_since = None
        self.waited_for = set()
        self._alarm_wait_s = self.parameters.degraded_s
        self._alarm_at = now + self._alarm_wait_s

    def arrived(self, peer: PeerName, now: float) -> None:
        late_s = now - self._quorum_since if self._quorum_since is not None else 0.0
        self._grace_period.arrived(peer, late_s)

    def due(self, round: Round, now: float) -> tuple[Cause, str] | None:
        """Which rule closes the round now, and an explanation; None while it stays open."""
        table = self._table
        delivered, awaited = table.delivered(round), table.awaited(round, now)
        missing = [peer for peer in table.peers if peer not in delivered]
        share = f"{len(delivered)} of {len(table.peers)}"
        quorum = len(delivered) >= self.parameters.min_peers
        complete = quorum and not awaited
        overtaken = table.supported_round() > round
        self._quorum_since = _since(self._quorum_since, quorum, now)
        self._overtaken_since = _since(self._overtaken_since, overtaken, now)
        self._complete_since = _since(self._complete_since, complete or overtaken, now)

        if not table.peers:
            return Cause.ALL, "this site trains alone"
        if self._is_confirming(round, now):
            return None
        if not missing:
            return Cause.ALL, f"all {count(len(delivered), 'peer')} delivered"
        if complete:
            standings = [f"{peer} is {table.standing(peer, round, now)}" for peer in missing]
            return Cause.ALL, f"nobody to wait for with {share}; {listed(standings)}"
        expired = self._expired(round, awaited, now)
        if expired is not None:
            return Cause.GRACE, f"{expired} over with {share}; missing {listed(missing)}"
        if overtaken and not self._is_still_arriving(round, now):
            beyond = table.count_beyond(round)
            are = "is" if beyond == 1 else "are"
            return Cause.OVERTAKEN, f"overtaken: {count(beyond, 'peer')} {are} beyond round {round}"
        return None

    def close(self, cause: Cause, round: Round, now: float) -> list[PeerName]:
        """Close the round; returns the live peers that it no longer waits for."""
        left_out: list[PeerName] = []
        if cause is Cause.GRACE and self._quorum_since is not None:
            left_out = self._table.awaited(round, now)
            for peer in left_out:
                self._grace_period.left_out(peer, now - self._quorum_since)
            self._table.stop_awaiting_unknown()
        self._quorum_since = None  # updates from now on are early for the next round
        return left_out

    def degraded_text(self, round: Round, now: float) -> str | None:
        """The text of the alarm that too few updates are here, when it is due; None otherwise."""
        if self._quorum_since is not None or now < self._alarm_at:
            return None
        longest_s = self.parameters.degraded_s * DEGRADED_BACKOFF_MAX
        self._alarm_wait_s = min(self._alarm_wait_s * DEGRADED_BACKOFF, longest_s)
        self._alarm_at = now + self._alarm_wait_s
        return self.status_text(round, now)

    def status_text(self, round: Round, now: float) -> str:
        """What the round is waiting for, for the operator."""
        table = self._table
        delivered, awaited = table.delivered(round), table.awaited(round, now)
        here = f"{len(delivered)} of at least {count(self.parameters.min_peers, 'update')} here"
        if self._quorum_since is None:
            absent = [peer for peer in table.peers if peer not in {*delivered, *table.excluded}]
            if not absent:
                return f"too few sites are left to wait for ({here})"
            return f"waiting for {listed(absent)} ({here})"
        if not awaited:
            return f"waiting for others to confirm what is here ({here})"
        waited_s, grace_s = now - self._quorum_since, self._grace_period.grace_for(awaited)
        if waited_s < grace_s:
            return f"waiting for {listed(awaited)} ({here}; closing in {grace_s - waited_s:.0f} s)"
        left_s = max(0.0, self.parameters.deadline_s - waited_s)
        closing = f"still making progress; closing in {left_s:.0f} s at the latest"
        return f"waiting for {listed(awaited)} ({here}; {closing})"

    def _is_confirming(self, round: Round, now: float) -> bool:
        """Whether the round stays open only for missing echo votes."""
        confirming_s = CONFIRMING_HEARTBEATS * self.parameters.heartbeat_s
        if self._complete_since is None or now - self._complete_since >= confirming_s:
            return False
        return bool(self._table.unconfirmed(round, now))

    def _expired(self, round: Round, awaited: list[PeerName], now: float) -> str | None:
        """Which wait is over, "grace" or "deadline"; None while there is more time or no quorum."""
        if self._quorum_since is None:
            return None
        waited_s = now - self._quorum_since
        if waited_s < self._grace_period.grace_for(awaited):
            return None
        # The slowest site may have the most data: it is not dropped while it makes progress.
        extends = self.parameters.deadline_s > self.parameters.grace_s
        progressing = self._table.progressing(round, now) if extends else []
        if not progressing:
            return "grace"
        self.waited_for.update(progressing)
        return None if waited_s < self.parameters.deadline_s else "deadline"

    def _is_still_arriving(self, round: Round, now: float) -> bool:
        """Whether to wait for downloads; otherwise a slow site would never merge anything."""
        since = self._overtaken_since
        late = since is not None and now - since >= self.parameters.grace_s
        return self._table.arriving(round) and not late


def _since(since: float | None, holds: bool, now: float) -> float | None:
    """Since when a condition has held without interruption."""
    if not holds:
        return None
    return now if since is None else since


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(items: Iterable[str]) -> str:
    *others, last = items
    return f"{', '.join(others)} and {last}" if others else last
