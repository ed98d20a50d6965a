"""One event, three readers: the log, the metrics and `status` are all fed from here.

The node tells the observer what happened; nothing here decides anything, and a steady state logs
nothing.  What concerns a peer is in `peers`; here is the node's own course.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightyear_node.observe.metrics import LOCAL, MERGED, WORKING, Outcome
from lightyear_node.observe.pace import UnderWay
from lightyear_node.observe.peers import PeersObserver
from lightyear_node.records import Fate, Harm, Opened, PeerName, Round, Verdict, fate

WAITING_REPEAT_S = 30.0
"""A node that waits says so again this often, so that it never hangs silently."""

Plain = Mapping[str, Any]
"""A verdict as it is recorded."""


@dataclass(slots=True)
class Observer(PeersObserver):
    waiting: str = "starting"
    model: str | None = None
    progress: tuple[int, int] | None = None
    under_way: UnderWay = field(default_factory=UnderWay)
    local: dict[str, float] = field(default_factory=dict)
    merged: dict[str, float] = field(default_factory=dict)
    harm: dict[str, Any] | None = None
    """What measuring the last completed round's merged model found, and which round that was."""
    _told: tuple[str, float] = ("", 0.0)
    _phase_since: float = field(default_factory=time.monotonic)
    _round_since: float | None = None
    """None for a round that was begun in an earlier life of the node."""
    _journal_broken: bool = False

    def __post_init__(self) -> None:
        self.metrics.phase.labels(self.phase).set(1)
        self.metrics.waiting.set_function(self._waiting_s)
        if self.threshold is not None:
            self.metrics.threshold.set(self.threshold)

    def _waiting_s(self) -> float:
        return time.monotonic() - self._phase_since if self.phase == "collecting" else 0.0

    def introduce(self, opened: Opened) -> None:
        self.metrics.probe_samples.set(opened.val_samples)
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
        """After a restart: all but the counters goes on from the last completed round."""
        if not rounds:
            return
        last = rounds[-1]
        self.model, self.local, self.merged = last["model"], last["local"], last["merged"]
        self.harm = {"round": last["round"], **last["harm"]} if last.get("harm") else None
        for entry in rounds:
            for verdict in entry["verdicts"]:
                self._note(entry["round"], verdict)
        self.metrics.last_completed.set(last["time"])
        self.metrics.accepted.set(sum(verdict["accepted"] for verdict in last["verdicts"]))
        self._share_out(last["verdicts"], self.harm)
        self._measure(LOCAL, self.local)
        self._measure(MERGED, self.merged)

    # The rounds.

    def at(self, round: Round, phase: str, waiting: str) -> None:
        """Called on every event; logs only when there is something new to wait for."""
        now = time.monotonic()
        if phase != self.phase:
            self._next_phase(phase, now)
        self.metrics.round.set(round)
        self.round, self.phase, self.waiting = round, phase, waiting
        # Counting down is not news.
        news = re.sub(r"[\d.]+ s\b", "", waiting)
        told, told_at = self._told
        if news != told or (phase == "collecting" and now - told_at > WAITING_REPEAT_S):
            self._told = (news, now)
            # Still waiting for the same is no news either, but whoever looks closely wants to know.
            level = logging.INFO if news != told else logging.DEBUG
            self._tell(level, "phase", "%s", waiting)

    def _next_phase(self, phase: str, now: float) -> None:
        self.metrics.phase.labels(self.phase).set(0)
        self.metrics.phase.labels(phase).set(1)
        if self.phase in WORKING:
            self.metrics.phase_duration.labels(self.phase).observe(now - self._phase_since)
        if phase == "training":
            self._round_since = now
        self._phase_since = now
        self.progress = None
        self.under_way.rest()

    def trained(self, round: Round, metrics: Mapping[str, float]) -> None:
        self.local = dict(metrics)
        self._measure(LOCAL, metrics)
        self._tell(logging.INFO, "trained", "round %d: trained, %s", round, _numbers(metrics))

    def scored(self, seconds: float) -> None:
        """The updates of a round have been judged."""
        self.metrics.score_duration.observe(seconds)

    def decided(self, round: Round, why: str, verdicts: Sequence[Verdict]) -> None:
        self.metrics.accepted.set(sum(verdict.accepted for verdict in verdicts))
        self.metrics.degraded.set(0)
        for verdict in verdicts:
            self.metrics.verdicts.of(verdict.peer, verdict.fate, verdict.reason).inc()
            self._note(round, asdict(verdict))
        words = ", ".join(_words(verdict) for verdict in verdicts)
        self._tell(logging.INFO, "closed", "round %d: closed, %s: %s", round, why, words)

    def _note(self, round: int, verdict: Plain) -> None:
        """What was last thought of a peer, and for how long; also replayed after a restart."""
        peer, reason, score = verdict["peer"], str(verdict["reason"]), verdict["score"]
        view = self.peers.get(peer)
        if view is None:  # it has left the federation since
            return
        view.judged(round, fate(verdict["accepted"], reason), reason, score)
        self.metrics.streak.of(peer).set(view.rejected_in_a_row)
        if score is not None:
            self.metrics.agreement.of(peer).set(score)

    def committed(
        self,
        round: Round,
        model: str,
        metrics: Mapping[str, float],
        harm: Harm | None = None,
        verdicts: Sequence[Plain] = (),
    ) -> None:
        """`verdicts` as they are recorded: the round may have been decided in an earlier life."""
        self.model, self.merged = model, dict(metrics)
        self.harm = {"round": round, **asdict(harm)} if harm is not None else None
        if harm is not None and harm.dropped:
            self._dropped(round, harm)
        self._share_out(verdicts, self.harm)
        self._measure(MERGED, metrics)
        self.metrics.rounds_total.labels(_outcome(verdicts, harm)).inc()
        self.metrics.last_completed.set_to_current_time()
        if self._round_since is not None:
            self.metrics.round_duration.observe(time.monotonic() - self._round_since)
            self._round_since = None
        self._tell(logging.INFO, "merged", "round %d: merged, %s", round, _numbers(metrics))

    def _dropped(self, round: Round, harm: Harm) -> None:
        for peer in harm.dropped:
            self.metrics.merge_dropped.of(peer).inc()
        self.metrics.reverts.inc(harm.kept_local)
        self._tell(logging.WARNING, "harm", "round %d: %s", round, harm.in_words())

    def _share_out(self, verdicts: Sequence[Plain], harm: Mapping[str, Any] | None) -> None:
        """The peers' parts in the last merge; of those that were dropped, our own model has it."""
        dropped = harm["dropped"] if harm else ()
        parts = {
            one["peer"]: one.get("weight", 0.0) for one in verdicts if one["peer"] not in dropped
        }
        for peer in self.peers:
            self.metrics.weight.of(peer).set(parts.get(peer, 0.0))

    def degraded(self, text: str) -> None:
        self.metrics.degraded.set(1)
        self._tell(logging.WARNING, "degraded", "%s", text)

    def left_out(self, text: str, peers: Sequence[PeerName]) -> None:
        for peer in peers:
            self.peers[peer].left_out += 1
            self.metrics.left_out.of(peer).inc()
        self._tell(logging.WARNING, "left_out", "%s", text)

    def finished(self, rounds: int, model: str) -> None:
        text = "all %d rounds are done; our model is %s"
        self._tell(logging.INFO, "finished", text, rounds, model)

    # The machine, the record and the settings.

    def disk_low(self, text: str) -> None:
        self.metrics.disk_low.set(1)
        self._tell(logging.WARNING, "disk", "%s", text)

    def disk_recovered(self, text: str) -> None:
        self.metrics.disk_low.set(0)
        self._tell(logging.INFO, "disk", "%s", text)

    def worker_restarted(self, reason: str, why: str) -> None:
        self.metrics.worker_restarts.labels(reason).inc()
        self._tell(logging.WARNING, "worker", "%s; starting another", why)

    def journal_holds(self) -> None:
        """From inside; what peers hold against it weighs more."""
        if not self._journal_broken:
            self.metrics.chain_valid.set(1)

    def journal_broken(self, about: str) -> None:
        self._journal_broken = True
        self.metrics.chain_valid.set(0)
        self._tell(logging.ERROR, "journal", "%s", about)

    def settings_read(self, usable: bool) -> None:
        self.metrics.reload_successful.set(usable)

    def reconfigured(
        self, what: str, expires: float, here: Collection[PeerName], rounds: int | None = None
    ) -> None:
        """The operator has changed something; `here` are the peers that are left."""
        self._tell(logging.INFO, "settings", "settings changed: %s", what)
        self.metrics.certificate_expiry.set(expires)
        if rounds is not None:
            self.metrics.rounds_configured.set(rounds)
        self.members(here)

    # What `status` shows.

    def status(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "phase": self.phase,
            "waiting": self.waiting,
            "finished": self.phase == "finished",
            "progress": self.progress,
            **self.under_way.to_plain(),
            "model": self.model,
            "metrics": {"local": self.local, "merged": self.merged},
            "harm": self.harm,
            "bytes": self.traffic.to_plain(),
            "peers": [{"name": name, **view.to_plain()} for name, view in self.peers.items()],
        }

    def _measure(self, stage: str, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if name == "loss":
                self.metrics.local_loss.labels(stage).set(value)
            else:
                self.metrics.local_metric.labels(name, stage).set(value)


def _outcome(verdicts: Sequence[Plain], harm: Harm | None) -> Outcome:
    fates = {fate(verdict["accepted"], verdict["reason"]) for verdict in verdicts}
    if Fate.ACCEPTED in fates:
        return Outcome.KEPT_LOCAL if harm is not None and harm.kept_local else Outcome.MERGED
    return Outcome.NONE_ACCEPTED if Fate.REJECTED in fates else Outcome.ALONE


def _numbers(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in sorted(metrics.items()))


def _words(verdict: Verdict) -> str:
    score = f" (agreement {verdict.score:.2f})" if verdict.score is not None else ""
    match verdict.fate:
        case Fate.ACCEPTED:
            return f"{verdict.peer} accepted{score}"
        case Fate.MISSING:
            return f"{verdict.peer} missing ({verdict.reason})"
        case Fate.REJECTED:
            return f"{verdict.peer} REJECTED as {verdict.reason}{score}"
