"""The status of every peer: each event about a peer is logged, counted and kept for `status`.

Late events about a peer that has been removed change no state and no metric.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightyear_node.observe.event_log import EventLog
from lightyear_node.observe.metrics import (
    AUTHENTICATION_FAILURES,
    RECEIVED,
    SENT,
    Metrics,
    refusal,
)
from lightyear_node.observe.progress import REFUSES_US, peer_state_text
from lightyear_node.types import Fate, Opinion, PeerName, Reason, Transfer, fate

ONE_WAY = "one-way"
REMOVED = "removed"
REFUSALS_MAX = 8
ACCUSATIONS_KEPT = 64
"""Proofs against this site that are recognized when repeated; a thief of our key can make more."""
CALL_S = 5.0
"""Upper bound for the duration of a call."""

PlainVerdict = Mapping[str, Any]
"""A verdict as it is recorded in the journal."""


@dataclass(slots=True)
class PeerStatus:
    """The last known state of one peer."""

    state: str = "unknown"
    about: str = ""
    round: int | None = None
    phase: str | None = None
    called_at: float = -math.inf
    sent_at: float = -math.inf
    verdict: str | None = None
    reason: str | None = None
    details: Mapping[str, str] = field(default_factory=dict)
    """Those of the last verdict: `types.Verdict.details`."""
    agreement: float | None = None
    verdict_round: int | None = None
    rejected_in_a_row: int = 0
    left_out: int = 0
    """Rounds that were closed without it although it was reachable."""
    differs: str = ""
    """Differences between its settings and ours."""
    opinion: str = ""
    """Its verdict on our update, if it shares verdicts."""
    refusals: set[str] = field(default_factory=set)
    """Logged since it was last reachable: its calls and ours may fail for different reasons."""
    transfer_problem: str = ""
    """Logged since the last complete transfer: retries usually fail for the same reason."""

    def judged(self, round: int, fate: Fate, reason: str, score: float | None) -> None:
        self.verdict, self.reason, self.verdict_round = fate, reason, round
        # A peer is blocked by our own operator: that does not count as a rejection.
        rejected = fate is Fate.REJECTED and reason != Reason.BLOCKED
        self.rejected_in_a_row = self.rejected_in_a_row + 1 if rejected else 0
        if score is not None:
            self.agreement = score

    def to_plain(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key not in _NOT_SHOWN}


_NOT_SHOWN = ("called_at", "sent_at", "refusals", "transfer_problem")
"""Fields of a peer's status that `status` omits."""


class PeerStatusTable(Mapping[PeerName, PeerStatus]):
    """The status of all peers, removed ones included."""

    def __init__(
        self, peers: Iterable[PeerName], metrics: Metrics, log: EventLog, heartbeat_s: float
    ) -> None:
        self._peers = {peer: PeerStatus() for peer in peers}
        self._metrics = metrics
        self._log = log
        self.heartbeat_s = heartbeat_s
        self._traffic = dict.fromkeys((RECEIVED, SENT), Transfer(0, 0, 0.0))
        """Weights exchanged with all peers since the start."""
        self._withheld: dict[PeerName, int] = {}
        self._accusations: deque[tuple[PeerName, int]] = deque(maxlen=ACCUSATIONS_KEPT)

    def __getitem__(self, peer: PeerName) -> PeerStatus:
        return self._peers[peer]

    def __iter__(self) -> Iterator[PeerName]:
        return iter(self._peers)

    def __len__(self) -> int:
        return len(self._peers)

    def to_plain(self) -> list[dict[str, Any]]:
        return [{"name": name, **status.to_plain()} for name, status in self._peers.items()]

    def traffic_to_plain(self) -> dict[str, int]:
        """Bytes of weights exchanged since the start, raw and on the wire."""
        received, sent = self._traffic[RECEIVED], self._traffic[SENT]
        return {
            "raw": received.raw_bytes,
            "wire": received.wire_bytes,
            "raw_sent": sent.raw_bytes,
            "wire_sent": sent.wire_bytes,
        }

    # Reachability and membership.

    def reached(self, peer: PeerName, round: int, phase: str) -> None:
        """The peer has answered our call."""
        self._set_state(peer, "reachable", "")
        self._set_position(peer, round, phase)

    def called(self, peer: PeerName, round: int, phase: str) -> None:
        """The peer has called us, which does not prove that we can call it."""
        status = self._peers[peer]
        status.called_at = time.monotonic()
        if status.state != ONE_WAY:
            self._set_state(peer, "reachable", "")
        self._set_position(peer, round, phase)

    def _set_position(self, peer: PeerName, round: int, phase: str) -> None:
        self._peers[peer].round, self._peers[peer].phase = round, phase
        self._metrics.reachable.of(peer).set(1)
        self._metrics.last_seen.of(peer).set_to_current_time()

    def sending(self, peer: PeerName) -> None:
        """A chunk of the peer's weights has arrived."""
        self._peers[peer].sent_at = time.monotonic()
        self._metrics.last_seen.of(peer).set_to_current_time()

    def unreachable(self, peer: PeerName, about: str) -> None:
        status = self._peers[peer]
        recently = time.monotonic() - 2 * self.heartbeat_s - CALL_S
        if status.sent_at > recently:
            return  # its reply is queued behind the weights that it is sending
        # A running peer calls us at every heartbeat, even if our own calls fail.
        if status.called_at > recently:
            self._set_state(peer, ONE_WAY, f"it reaches us, but we do not reach it: {about}")
            return
        self._set_state(peer, "unreachable", about)
        self._metrics.reachable.of(peer).set(0)

    def _set_state(self, peer: PeerName, state: str, about: str, reason: str = "") -> None:
        status = self._peers[peer]
        if status.state == REMOVED:  # a late event
            return
        if state == "reachable":
            status.refusals.clear()
        known = state == status.state == "refused" and about in status.refusals
        if (state, about) != (status.state, status.about) and not known:
            level = logging.INFO if state == "reachable" else logging.WARNING
            text = peer_state_text(state, about)
            verb = "" if text.startswith(REFUSES_US) else "is "
            kind = f"{state} {reason}"
            self._log.write(level, "peer", "%s %s%s", peer, verb, text, peer=peer, kind=kind)
        if state == "refused":
            status.refusals = {about, *list(status.refusals)[: REFUSALS_MAX - 1]}
        status.state, status.about = state, about

    def set_members(self, members: Collection[PeerName]) -> None:
        """Apply a new peers.yaml; `members` excludes this site."""
        self._metrics.configured.set(len(members))
        for peer in members:
            if peer not in self._peers or self._peers[peer].state == REMOVED:
                self._peers[peer] = PeerStatus()
                self._metrics.add_peer(peer)
        for peer, status in self._peers.items():
            if peer not in members:
                status.state, status.about = REMOVED, "no longer in peers.yaml"
                self._metrics.remove_peer(peer)

    # Messages and calls.

    def refused(self, peer: PeerName, reason: Reason, about: str) -> None:
        """A message or the identity of the peer was refused, or the peer refused ours."""
        self._set_state(peer, "refused", about, reason)
        self._metrics.refusals.of(peer, refusal(reason)).inc()

    def differs(self, peer: PeerName, differences: Sequence[str]) -> None:
        """The peer's settings differ from ours, without effect on rounds; empty if equal again."""
        self._peers[peer].differs = "; ".join(differences)
        for difference in differences:
            text = "%s differs: %s"
            self._log.write(logging.WARNING, "differs", text, peer, difference, peer=peer)

    def opinion(self, peer: PeerName, opinion: Opinion) -> None:
        """The peer has sent its verdict on our update."""
        self._peers[peer].opinion = "accepts ours" if opinion.accepted else opinion.reason
        if not opinion.accepted:
            text = "%s refuses our update, in its round %d: %s"
            args = (peer, opinion.round, opinion.reason)
            self._log.write(logging.WARNING, "opinion", text, *args, peer=peer)

    def denied(self, peer: PeerName | None, reason: str) -> None:
        """A call of a peer, or of a stranger (None), was denied."""
        if peer is None or reason in AUTHENTICATION_FAILURES:
            self._metrics.authentication_failures.labels(reason).inc()
        else:
            self._metrics.denials.of(peer, reason).inc()

    # Transfers of weights.

    def transferred(self, peer: PeerName, direction: str, transfer: Transfer) -> None:
        self._traffic[direction] += transfer
        if direction == RECEIVED:
            self._peers[peer].transfer_problem = ""
        self._metrics.bytes.of(peer, direction).inc(transfer.wire_bytes)
        self._metrics.raw_bytes.of(peer, direction).inc(transfer.raw_bytes)
        self._metrics.transfer_duration.labels(direction).observe(transfer.seconds)

    def transfer_failed(self, peer: PeerName, reason: Reason, about: str) -> None:
        self._metrics.transfer_errors.of(peer, RECEIVED, refusal(reason)).inc()
        if reason is Reason.DISK_FULL:
            return  # our own problem, logged once by `Observer.disk_low`
        if self._peers[peer].transfer_problem == about:
            return
        self._peers[peer].transfer_problem = about
        text = "the update of %s did not arrive: %s"
        self._log.write(logging.WARNING, "transfer", text, peer, about, peer=peer, kind=reason)

    def sending_failed(self, peer: PeerName, reason: Reason) -> None:
        """Our update did not reach the peer; not logged, because the peer retries."""
        self._metrics.transfer_errors.of(peer, SENT, reason).inc()

    def resumed(self, peer: PeerName) -> None:
        """An interrupted transfer was resumed."""
        self._metrics.resumes.of(peer).inc()

    # Verdicts and merges.

    def judged(self, round: int, verdict: PlainVerdict) -> None:
        """Keep a peer's last verdict; also called with recorded verdicts after a restart."""
        peer, reason, score = verdict["peer"], str(verdict["reason"]), verdict["score"]
        status = self._peers.get(peer)
        if status is None:  # it has left the federation since
            return
        status.judged(round, fate(verdict["accepted"], reason), reason, score)
        status.details = dict(verdict.get("details") or {})
        self._metrics.streak.of(peer).set(status.rejected_in_a_row)
        if score is not None:
            self._metrics.agreement.of(peer).set(score)

    def left_out(self, peers: Iterable[PeerName]) -> None:
        """A round was closed without these peers although they were reachable."""
        for peer in peers:
            self._peers[peer].left_out += 1
            self._metrics.left_out.of(peer).inc()

    def set_weights(self, verdicts: Sequence[PlainVerdict], dropped: Collection[PeerName]) -> None:
        """Set the peers' weights in the last merge; the weight of `dropped` went to our model."""
        weights = {
            verdict["peer"]: verdict.get("weight", 0.0)
            for verdict in verdicts
            if verdict["peer"] not in dropped
        }
        for peer in self._peers:
            self._metrics.weight.of(peer).set(weights.get(peer, 0.0))

    # Trust.

    def set_quarantined(self, quarantined: Collection[PeerName]) -> None:
        for peer in self._peers:
            self._metrics.quarantined.of(peer).set(peer in quarantined)

    def quarantined(self, peer: PeerName, round: int) -> None:
        self._metrics.equivocations.of(peer).inc()
        self._metrics.quarantined.of(peer).set(1)
        self._log.write(
            logging.ERROR,
            "quarantined",
            "%s has signed two different updates of round %d: it is in quarantine until"
            " `lightyear-node peers unquarantine %s`",
            peer,
            round,
            peer,
            peer=peer,
        )

    def withheld(self, counts: Mapping[PeerName, int]) -> None:
        """Journal records not written because of each peer's quota, in total since its start."""
        for peer, count in counts.items():
            before = self._withheld.get(peer, 0)
            if count != before:
                # Fewer than before: the peer was removed and added again, and counts from zero.
                self._metrics.withheld.of(peer).inc(count - before if count > before else count)
                self._withheld[peer] = count

    def rewritten(self, peer: PeerName, about: str) -> None:
        """A peer's journal contradicts what it has shown us before."""
        self._metrics.rewritten.of(peer).inc()
        self._log.write(logging.WARNING, "rewritten", "%s", about, peer=peer)

    def accused(self, by: PeerName, round: int) -> None:
        """A peer holds, and repeats at each heartbeat, a proof that this site equivocated."""
        if (by, round) in self._accusations:
            return
        self._accusations.append((by, round))
        self._metrics.accusations.inc()
        self._log.write(
            logging.ERROR,
            "accused",
            "%s holds two different updates of round %d with our signature: do two machines run"
            " with our keys?",
            by,
            round,
            peer=by,
        )
