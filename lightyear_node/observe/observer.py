"""One event, three readers: the log, the metrics and `status` are all fed from here.

The node tells the observer what happened; nothing here decides anything, and a steady state logs
nothing.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightyear_node.observe.metrics import Metrics
from lightyear_node.records import Harm, Opened, Opinion, PeerName, Reason, Round, Transfer, Verdict

WAITING_REPEAT_S = 30.0
"""A node that waits says so again this often, so that it never hangs silently."""

ONE_WAY = "one-way"
REMOVED = "removed"
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


@dataclass(slots=True)
class Traffic:
    raw_received: int = 0
    wire_received: int = 0
    raw_sent: int = 0
    wire_sent: int = 0

    def add(self, direction: str, transfer: Transfer) -> None:
        setattr(self, f"raw_{direction}", getattr(self, f"raw_{direction}") + transfer.raw_bytes)
        setattr(self, f"wire_{direction}", getattr(self, f"wire_{direction}") + transfer.wire_bytes)


@dataclass(slots=True)
class Observer:
    metrics: Metrics
    log: logging.Logger
    peers: dict[PeerName, PeerView]
    threshold: float | None
    """The agreement that a peer must reach; None under rules that do not ask for it."""
    heartbeat_s: float = 5.0
    round: int = 0
    phase: str = "starting"
    waiting: str = "starting"
    model: str | None = None
    progress: tuple[int, int] | None = None
    local: dict[str, float] = field(default_factory=dict)
    merged: dict[str, float] = field(default_factory=dict)
    harm: dict[str, Any] | None = None
    """What measuring the last completed round's merged model found, and which round that was."""
    traffic: Traffic = field(default_factory=Traffic)
    _told: tuple[str, float] = ("", 0.0)
    _accusation: str = ""

    # The node's own course.

    def introduce(self, opened: Opened) -> None:
        self._tell(
            logging.INFO,
            "model",
            "model of %d parameters on %s, %d training and %d validation samples, head %s",
            opened.parameters,
            opened.device,
            opened.train_samples,
            opened.val_samples,
            opened.head,
        )
        for warning in opened.warnings:
            self._tell(logging.WARNING, "model", "%s", warning)
        if self.threshold is not None and opened.floor > self.threshold:
            self._tell(
                logging.WARNING,
                "model",
                "with %d validation samples even unrelated models can reach an agreement of %.2f,"
                " above the threshold %.2f: use more validation data",
                opened.val_samples,
                opened.floor,
                self.threshold,
            )

    def remember(self, rounds: Sequence[Mapping[str, Any]]) -> None:
        """After a restart: `status` goes on from the last completed round."""
        if not rounds:
            return
        last = rounds[-1]
        self.model, self.local, self.merged = last["model"], last["local"], last["merged"]
        self.harm = {"round": last["round"], **last["harm"]} if last.get("harm") else None
        for entry in rounds:
            for verdict in entry["verdicts"]:
                if verdict["peer"] in self.peers:  # it may have left the federation since
                    name = _verdict_name(verdict["accepted"], verdict["digest"])
                    self._note(entry["round"], verdict, name)

    def at(self, round: Round, phase: str, waiting: str) -> None:
        """Called on every event; logs only when there is something new to wait for."""
        if phase != self.phase:
            self.metrics.phase.labels(self.phase).set(0)
            self.metrics.phase.labels(phase).set(1)
            self.progress = None
        self.metrics.round.set(round)
        self.round, self.phase, self.waiting = round, phase, waiting
        # Counting down is not news.
        news = re.sub(r"[\d.]+ s\b", "", waiting)
        now = time.monotonic()
        told, told_at = self._told
        if news != told or (phase == "collecting" and now - told_at > WAITING_REPEAT_S):
            self._told = (news, now)
            self._tell(logging.INFO, "phase", "%s", waiting)

    def trained(self, round: Round, metrics: Mapping[str, float]) -> None:
        self.local = dict(metrics)
        self._measure("local", metrics)
        self._tell(logging.INFO, "trained", "round %d: trained, %s", round, _numbers(metrics))

    def decided(self, round: Round, why: str, verdicts: Sequence[Verdict]) -> None:
        self.metrics.accepted.set(sum(verdict.accepted for verdict in verdicts))
        self.metrics.degraded.set(0)
        for verdict in verdicts:
            self._judged(round, verdict)
        words = ", ".join(_words(verdict) for verdict in verdicts)
        self._tell(logging.INFO, "closed", "round %d: closed, %s: %s", round, why, words)

    def _judged(self, round: Round, verdict: Verdict) -> None:
        name = _verdict_name(verdict.accepted, verdict.digest)
        self.metrics.verdicts.labels(verdict.peer, name, verdict.reason).inc()
        seen = {"peer": verdict.peer, "reason": str(verdict.reason), "score": verdict.score}
        self._note(round, seen, name)

    def _note(self, round: int, verdict: Mapping[str, Any], name: str) -> None:
        """What was last thought of a peer, and for how long; also replayed after a restart."""
        peer, view = verdict["peer"], self.peers[verdict["peer"]]
        view.verdict, view.reason, view.verdict_round = name, verdict["reason"], round
        view.rejected_in_a_row = view.rejected_in_a_row + 1 if name == "rejected" else 0
        self.metrics.streak.labels(peer).set(view.rejected_in_a_row)
        if verdict["score"] is not None:
            view.agreement = verdict["score"]
            self.metrics.agreement.labels(peer).set(verdict["score"])

    def committed(
        self, round: Round, model: str, metrics: Mapping[str, float], harm: Harm | None = None
    ) -> None:
        self.model, self.merged = model, dict(metrics)
        self.harm = {"round": round, **asdict(harm)} if harm is not None else None
        if harm is not None and harm.dropped:
            self._left_out(round, harm)
        self._measure("merged", metrics)
        self.metrics.rounds_total.inc()
        self.metrics.last_completed.set_to_current_time()
        self._tell(logging.INFO, "merged", "round %d: merged, %s", round, _numbers(metrics))

    def _left_out(self, round: Round, harm: Harm) -> None:
        for peer in harm.dropped:
            self.metrics.merge_dropped.labels(peer).inc()
        self.metrics.kept_local.inc(harm.kept_local)
        self._tell(logging.WARNING, "harm", "round %d: %s", round, harm.in_words())

    def degraded(self, text: str) -> None:
        self.metrics.degraded.set(1)
        self._tell(logging.WARNING, "degraded", "%s", text)

    def left_out(self, text: str, peers: Sequence[PeerName]) -> None:
        for peer in peers:
            self.peers[peer].left_out += 1
            self.metrics.left_out.labels(peer).inc()
        self._tell(logging.WARNING, "left_out", "%s", text)

    def finished(self, rounds: int, model: str) -> None:
        text = "all %d rounds are done; our model is %s"
        self._tell(logging.INFO, "finished", text, rounds, model)

    def disk_low(self, text: str) -> None:
        self.metrics.disk_low.set(1)
        self._tell(logging.WARNING, "disk", "%s", text)

    def disk_recovered(self, text: str) -> None:
        self.metrics.disk_low.set(0)
        self._tell(logging.INFO, "disk", "%s", text)

    def worker_restarted(self, why: str) -> None:
        self.metrics.worker_restarts.inc()
        self._tell(logging.WARNING, "worker", "%s; starting another", why)

    # The peers.

    def reached(self, peer: PeerName, round: int, phase: str) -> None:
        """It has answered our call."""
        self._peer_is(peer, "reachable", "")
        self._is_at(peer, round, phase)
        self.metrics.reachable.labels(peer).set(1)

    def called(self, peer: PeerName, round: int, phase: str) -> None:
        """It has called us, which does not say that we could call it."""
        view = self.peers[peer]
        view.called_at = time.monotonic()
        if view.state != ONE_WAY:
            self._peer_is(peer, "reachable", "")
        self._is_at(peer, round, phase)
        self.metrics.reachable.labels(peer).set(1)

    def sending(self, peer: PeerName) -> None:
        """A piece of its weights has come."""
        self.peers[peer].sent_at = time.monotonic()

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
        self.metrics.reachable.labels(peer).set(0)

    def _is_at(self, peer: PeerName, round: int, phase: str) -> None:
        self.peers[peer].round, self.peers[peer].phase = round, phase

    def refused(self, peer: PeerName, reason: Reason, about: str) -> None:
        """Something this peer sent, or is, cannot be used."""
        self._peer_is(peer, "refused", about)
        self.metrics.refusals.labels(peer, reason).inc()

    def differs(self, peer: PeerName, about: Sequence[str]) -> None:
        """Not an obstacle, but somebody should look; nothing, if all is equal again."""
        self.peers[peer].differs = "; ".join(about)
        for difference in about:
            text = "%s differs: %s"
            self._tell(logging.WARNING, "differs", text, peer, difference, peer=peer)

    def noted(
        self, kind: str, about: Mapping[str, Any], paused: bool, quarantined: Collection[PeerName]
    ) -> None:
        """Something besides the rounds has changed what the node remembers."""
        self.metrics.paused.set(paused)
        for peer in self.peers:
            self.metrics.quarantined.labels(peer).set(peer in quarantined)
        if kind != "witness":
            words = ", ".join(f"{key} {value}" for key, value in about.items())
            self._tell(logging.INFO, kind, "%s%s", kind, f": {words}" if words else "")

    def quarantined(self, peer: PeerName, round: int) -> None:
        self.metrics.quarantined.labels(peer).set(1)
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

    def opinion(self, peer: PeerName, opinion: Opinion) -> None:
        """A peer has told us what it decided about our update."""
        self.peers[peer].opinion = "accepts ours" if opinion.accepted else opinion.reason
        if not opinion.accepted:
            text = "%s refuses our update, in its round %d: %s"
            about = (peer, opinion.round, opinion.reason)
            self._tell(logging.WARNING, "opinion", text, *about, peer=peer)

    def accused(self, by: PeerName, round: int) -> None:
        """Somebody holds a proof against ourselves."""
        text = f"{by} holds two different updates of round {round} with our signature"
        if self._accusation != text:
            words = "%s: do two machines run with our keys?"
            self._tell(logging.ERROR, "accused", words, text, peer=by)
        self._accusation = text

    def _peer_is(self, peer: PeerName, state: str, about: str) -> None:
        view = self.peers[peer]
        if view.state == REMOVED:  # a last word that was on its way
            return
        if (state, about) != (view.state, view.about):
            level = logging.INFO if state == "reachable" else logging.WARNING
            more = f": {about}" if about else ""
            self._tell(level, "peer", "%s is %s%s", peer, state, more, peer=peer)
        view.state, view.about = state, about

    def reconfigured(self, what: str, expires: float, here: Collection[PeerName]) -> None:
        """The operator has changed something; `here` are the peers that are left."""
        self._tell(logging.INFO, "settings", "settings changed: %s", what)
        self.metrics.certificate_expiry.set(expires)
        self.metrics.configured.set(len(here))
        for peer in here:
            if peer not in self.peers:
                self.peers[peer] = PeerView()
                self.metrics.admit(peer)
        for peer, view in self.peers.items():
            if peer not in here:
                view.state, view.about = REMOVED, "no longer in peers.yaml"
                self.metrics.reachable.labels(peer).set(0)
            elif view.state == REMOVED:
                view.state, view.about = "unknown", ""

    def transferred(self, peer: PeerName, direction: str, transfer: Transfer) -> None:
        self.traffic.add(direction, transfer)
        self.metrics.bytes.labels(peer, direction).inc(transfer.wire_bytes)
        self.metrics.raw_bytes.labels(peer, direction).inc(transfer.raw_bytes)

    def transfer_failed(self, peer: PeerName, reason: Reason, about: str) -> None:
        self.metrics.transfer_errors.labels(peer, reason).inc()
        if reason is Reason.DISK_FULL:
            return  # our own trouble, which is told once and not for every attempt
        text = "the update of %s did not arrive: %s"
        self._tell(logging.WARNING, "transfer", text, peer, about, peer=peer)

    def stranger(self, reason: str) -> None:
        self.metrics.authentication_failures.labels(reason).inc()

    def _tell(
        self, level: int, event: str, text: str, *args: object, peer: PeerName | None = None
    ) -> None:
        """One line of the log, with what a program wants to know about it beside the words."""
        about = {"event": event, "round": self.round, "phase": self.phase, "peer": peer}
        self.log.log(level, text, *args, extra=about)

    # What `status` shows.

    def status(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "phase": self.phase,
            "waiting": self.waiting,
            "finished": self.phase == "finished",
            "progress": self.progress,
            "model": self.model,
            "metrics": {"local": self.local, "merged": self.merged},
            "harm": self.harm,
            "bytes": {
                "raw": self.traffic.raw_received,
                "wire": self.traffic.wire_received,
                "raw_sent": self.traffic.raw_sent,
                "wire_sent": self.traffic.wire_sent,
            },
            "peers": [
                {
                    "name": name,
                    "state": view.state,
                    "about": view.about,
                    "round": view.round,
                    "phase": view.phase,
                    "verdict": view.verdict,
                    "reason": view.reason,
                    "agreement": view.agreement,
                    "verdict_round": view.verdict_round,
                    "rejected_in_a_row": view.rejected_in_a_row,
                    "left_out": view.left_out,
                    "differs": view.differs,
                    "opinion": view.opinion,
                }
                for name, view in self.peers.items()
            ],
        }

    def _measure(self, stage: str, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.metrics.local_metric.labels(name, stage).set(value)


def _verdict_name(accepted: bool, digest: str | None) -> str:
    """Nobody is rejected for what never arrived."""
    return "accepted" if accepted else "missing" if digest is None else "rejected"


def _numbers(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in sorted(metrics.items()))


def _words(verdict: Verdict) -> str:
    score = f" (agreement {verdict.score:.2f})" if verdict.score is not None else ""
    if verdict.accepted:
        return f"{verdict.peer} accepted{score}"
    if verdict.digest is None:
        return f"{verdict.peer} missing ({verdict.reason})"
    return f"{verdict.peer} REJECTED as {verdict.reason}{score}"
