"""What this site knows of its peers: half of the observer.

Each event is told to the log, counted, and kept for `status`.  A peer that has been removed may
still be talked about for a moment: that changes nothing, and counts nowhere.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightyear_node.observe.metrics import RECEIVED, SENT, STRANGERS, Metrics, refusal
from lightyear_node.records import Fate, Opinion, PeerName, Reason, Transfer

ONE_WAY = "one-way"
REMOVED = "removed"
REFUSALS_MAX = 8
CALL_S = 5.0
"""Longer than any call takes."""


@dataclass(slots=True)
class PeerView:
    """What this site last knew of one peer."""

    state: str = "unknown"
    about: str = ""
    round: int | None = None
    phase: str | None = None
    called_at: float = -math.inf
    sent_at: float = -math.inf
    verdict: str | None = None
    reason: str | None = None
    agreement: float | None = None
    verdict_round: int | None = None
    rejected_in_a_row: int = 0
    left_out: int = 0
    """Rounds that were closed without it, though it was there."""
    differs: str = ""
    """What its settings have other than ours."""
    opinion: str = ""
    """What it says of our update, if it shares that."""
    refusals: set[str] = field(default_factory=set)
    """Told since it was last reachable: its calls and ours may fail for different reasons."""
    transfer_problem: str = ""
    """Told since an update of it has last arrived: every attempt fails for the same reason."""

    def judged(self, round: int, fate: Fate, reason: str, score: float | None) -> None:
        self.verdict, self.reason, self.verdict_round = fate, reason, round
        # That a peer is blocked is our operator's own doing, and no news.
        rejected = fate is Fate.REJECTED and reason != Reason.BLOCKED
        self.rejected_in_a_row = self.rejected_in_a_row + 1 if rejected else 0
        if score is not None:
            self.agreement = score

    def to_plain(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "about": self.about,
            "round": self.round,
            "phase": self.phase,
            "verdict": self.verdict,
            "reason": self.reason,
            "agreement": self.agreement,
            "verdict_round": self.verdict_round,
            "rejected_in_a_row": self.rejected_in_a_row,
            "left_out": self.left_out,
            "differs": self.differs,
            "opinion": self.opinion,
        }


@dataclass(slots=True)
class Traffic:
    raw_received: int = 0
    wire_received: int = 0
    raw_sent: int = 0
    wire_sent: int = 0

    def add(self, direction: str, transfer: Transfer) -> None:
        setattr(self, f"raw_{direction}", getattr(self, f"raw_{direction}") + transfer.raw_bytes)
        setattr(self, f"wire_{direction}", getattr(self, f"wire_{direction}") + transfer.wire_bytes)

    def to_plain(self) -> dict[str, int]:
        return {
            "raw": self.raw_received,
            "wire": self.wire_received,
            "raw_sent": self.raw_sent,
            "wire_sent": self.wire_sent,
        }


@dataclass(slots=True)
class PeersObserver:
    metrics: Metrics
    log: logging.Logger
    peers: dict[PeerName, PeerView]
    threshold: float | None
    """The agreement that a peer must reach; None under rules that do not ask for it."""
    heartbeat_s: float = 5.0
    round: int = 0
    phase: str = "starting"
    traffic: Traffic = field(default_factory=Traffic)
    _accusations: set[tuple[PeerName, int]] = field(default_factory=set)

    # Who is there.

    def reached(self, peer: PeerName, round: int, phase: str) -> None:
        """It has answered our call."""
        self._peer_is(peer, "reachable", "")
        self._is_at(peer, round, phase)

    def called(self, peer: PeerName, round: int, phase: str) -> None:
        """It has called us, which does not say that we could call it."""
        view = self.peers[peer]
        view.called_at = time.monotonic()
        if view.state != ONE_WAY:
            self._peer_is(peer, "reachable", "")
        self._is_at(peer, round, phase)

    def _is_at(self, peer: PeerName, round: int, phase: str) -> None:
        self.peers[peer].round, self.peers[peer].phase = round, phase
        self.metrics.reachable.of(peer).set(1)
        self.metrics.last_seen.of(peer).set_to_current_time()

    def sending(self, peer: PeerName) -> None:
        """A piece of its weights has come."""
        self.peers[peer].sent_at = time.monotonic()
        self.metrics.last_seen.of(peer).set_to_current_time()

    def unreachable(self, peer: PeerName, about: str) -> None:
        view = self.peers[peer]
        lately = time.monotonic() - 2 * self.heartbeat_s - CALL_S
        if view.sent_at > lately:
            return  # the answer waits behind its weights
        # Who is alive calls us at every heartbeat, whatever becomes of our own calls.
        if view.called_at > lately:
            self._peer_is(peer, ONE_WAY, f"it reaches us, but we do not reach it: {about}")
            return
        self._peer_is(peer, "unreachable", about)
        self.metrics.reachable.of(peer).set(0)

    def _peer_is(self, peer: PeerName, state: str, about: str) -> None:
        view = self.peers[peer]
        if view.state == REMOVED:  # a last word that was on its way
            return
        if state == "reachable":
            view.refusals.clear()
        known = state == view.state == "refused" and about in view.refusals
        if (state, about) != (view.state, view.about) and not known:
            level = logging.INFO if state == "reachable" else logging.WARNING
            more = f": {about}" if about else ""
            self._tell(level, "peer", "%s is %s%s", peer, state, more, peer=peer)
        if state == "refused":
            view.refusals = {about, *list(view.refusals)[: REFUSALS_MAX - 1]}
        view.state, view.about = state, about

    def members(self, here: Collection[PeerName]) -> None:
        """Who is in peers.yaml from now on, besides us."""
        self.metrics.configured.set(len(here))
        for peer in here:
            if peer not in self.peers or self.peers[peer].state == REMOVED:
                self.peers[peer] = PeerView()
                self.metrics.admit(peer)
        for peer, view in self.peers.items():
            if peer not in here:
                view.state, view.about = REMOVED, "no longer in peers.yaml"
                self.metrics.dismiss(peer)

    # What they say.

    def refused(self, peer: PeerName, reason: Reason, about: str) -> None:
        """Something this peer sent, or is, cannot be used."""
        self._peer_is(peer, "refused", about)
        self.metrics.refusals.of(peer, refusal(reason)).inc()

    def differs(self, peer: PeerName, about: Sequence[str]) -> None:
        """Not an obstacle, but somebody should look; nothing, if all is equal again."""
        self.peers[peer].differs = "; ".join(about)
        for difference in about:
            text = "%s differs: %s"
            self._tell(logging.WARNING, "differs", text, peer, difference, peer=peer)

    def opinion(self, peer: PeerName, opinion: Opinion) -> None:
        """A peer has told us what it decided about our update."""
        self.peers[peer].opinion = "accepts ours" if opinion.accepted else opinion.reason
        if not opinion.accepted:
            text = "%s refuses our update, in its round %d: %s"
            about = (peer, opinion.round, opinion.reason)
            self._tell(logging.WARNING, "opinion", text, *about, peer=peer)

    def denied(self, peer: PeerName | None, reason: str) -> None:
        """A call was not answered, of a peer or of a stranger."""
        if peer is None or reason in STRANGERS:
            self.metrics.authentication_failures.labels(reason).inc()
        else:
            self.metrics.denials.of(peer, reason).inc()

    # Their weights.

    def transferred(self, peer: PeerName, direction: str, transfer: Transfer) -> None:
        self.traffic.add(direction, transfer)
        if direction == RECEIVED:
            self.peers[peer].transfer_problem = ""
        self.metrics.bytes.of(peer, direction).inc(transfer.wire_bytes)
        self.metrics.raw_bytes.of(peer, direction).inc(transfer.raw_bytes)
        self.metrics.transfer_duration.labels(direction).observe(transfer.seconds)

    def transfer_failed(self, peer: PeerName, reason: Reason, about: str) -> None:
        self.metrics.transfer_errors.of(peer, RECEIVED, refusal(reason)).inc()
        if reason is Reason.DISK_FULL:
            return  # our own trouble, which is told once and not for every attempt
        if self.peers[peer].transfer_problem == about:
            return
        self.peers[peer].transfer_problem = about
        text = "the update of %s did not arrive: %s"
        self._tell(logging.WARNING, "transfer", text, peer, about, peer=peer)

    def sending_failed(self, peer: PeerName, reason: Reason) -> None:
        """Ours did not arrive there; the peer asks again, so there is nothing to tell."""
        self.metrics.transfer_errors.of(peer, SENT, reason).inc()

    def resumed(self, peer: PeerName) -> None:
        """The line broke under a transfer, which goes on where it was."""
        self.metrics.resumes.of(peer).inc()

    # Whether they can be trusted.

    def noted(
        self, kind: str, about: Mapping[str, Any], paused: bool, quarantined: Collection[PeerName]
    ) -> None:
        """Something besides the rounds has changed what the node remembers."""
        self.stands(paused, quarantined)
        if kind != "witness":
            words = ", ".join(f"{key} {value}" for key, value in about.items())
            self._tell(logging.INFO, kind, "%s%s", kind, f": {words}" if words else "")

    def stands(self, paused: bool, quarantined: Collection[PeerName]) -> None:
        self.metrics.paused.set(paused)
        for peer in self.peers:
            self.metrics.quarantined.of(peer).set(peer in quarantined)

    def quarantined(self, peer: PeerName, round: int) -> None:
        self.metrics.equivocations.of(peer).inc()
        self.metrics.quarantined.of(peer).set(1)
        self._tell(
            logging.ERROR,
            "quarantined",
            "%s has signed two different updates of round %d: it is in quarantine until"
            " `lightyear-node peers unquarantine %s`",
            peer,
            round,
            peer,
            peer=peer,
        )

    def rewritten(self, peer: PeerName, about: str) -> None:
        """A peer's journal is not the one that it has shown us before."""
        self.metrics.rewritten.of(peer).inc()
        self._tell(logging.WARNING, "rewritten", "%s", about, peer=peer)

    def accused(self, by: PeerName, round: int) -> None:
        """Somebody holds a proof against ourselves; it says so at every heartbeat."""
        if (by, round) in self._accusations:
            return
        self._accusations.add((by, round))
        self.metrics.accusations.inc()
        self._tell(
            logging.ERROR,
            "accused",
            "%s holds two different updates of round %d with our signature: do two machines run"
            " with our keys?",
            by,
            round,
            peer=by,
        )

    def _tell(
        self, level: int, event: str, text: str, *args: object, peer: PeerName | None = None
    ) -> None:
        """One line of the log, with what a program wants to know about it beside the words."""
        about = {"event": event, "round": self.round, "phase": self.phase, "peer": peer}
        self.log.log(level, text, *args, extra=about)
