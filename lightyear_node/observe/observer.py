"""Feeds the log, the metrics and `status` from the same events of the node.

Decides nothing, and logs nothing in a steady state.  Events about a peer go to `peers`.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lightyear_node.errors import LightyearError
from lightyear_node.observe.event_log import EventLog
from lightyear_node.observe.log_limits import LogLimits
from lightyear_node.observe.metrics import ALONE, LOCAL, MERGED, WORKING, Metrics, RoundOutcome
from lightyear_node.observe.peer_status import PeerStatusTable, PlainVerdict
from lightyear_node.observe.progress import CurrentJobs, duration
from lightyear_node.types import (
    Fate,
    Harm,
    Opened,
    PeerName,
    Round,
    Served,
    Verdict,
    Worth,
    fate,
)

WAITING_REPEAT_S = 30.0
"""Interval at which an unchanged wait is logged again, at debug level."""
PHASE_LINES_MAX = 20
"""Log lines per phase about what it waits for, plus two per peer; peers can change it at will."""
FLOOD_OVER_S = 10.0
"""Time without closed connections after which a flood of strangers counts as over."""


class Observer:
    """The node's own events: rounds, machine, journal, settings.

    `threshold` is the agreement that a peer must reach; None if the rule has none.
    """

    def __init__(
        self,
        metrics: Metrics,
        log: logging.Logger,
        peers: Iterable[PeerName],
        threshold: float | None,
        heartbeat_s: float = 5.0,
        log_limits: LogLimits | None = None,
    ) -> None:
        self.metrics = metrics
        self.log = log
        self.log_limits = log_limits or LogLimits()
        self.log_limits.on_suppressed = metrics.log_suppressed.inc
        self._event_log = EventLog(log, self.log_limits)
        self.peers = PeerStatusTable(peers, metrics, self._event_log, heartbeat_s)
        self.threshold = threshold
        self.waiting = "starting"
        self.model: str | None = None
        self.progress: tuple[int, int] | None = None
        self.current_jobs = CurrentJobs()
        self.local: dict[str, float] = {}
        self.merged: dict[str, float] = {}
        self.harm: dict[str, Any] | None = None
        """Result of the merge check of the last completed round, with that round's number."""
        self.worth: dict[str, Any] | None = None
        """Comparison with the model that never merges, of the last completed round."""
        self.failure: str | None = None
        """Why training or merging keeps failing; None while it works."""
        self._serving: Served | None = None
        self._phase_logged = ("", 0.0)
        """The last phase text without its countdown, and when it was logged."""
        self._phase_lines = 0
        self._phase_since = time.monotonic()
        self._round_since: float | None = None
        """None for a round that began before the last restart."""
        self._journal_broken: str | None = None
        self._damaged: dict[str, str] = {}
        self._flood = 0
        """Connections closed in the current flood of strangers."""
        self._flood_at = 0.0
        metrics.phase.labels(self.phase).set(1)
        metrics.waiting.set_function(self._waiting_s)
        if threshold is not None:
            metrics.threshold.set(threshold)

    @property
    def round(self) -> int:
        return self._event_log.round

    @property
    def phase(self) -> str:
        return self._event_log.phase

    def _waiting_s(self) -> float:
        return time.monotonic() - self._phase_since if self.phase == "collecting" else 0.0

    def model_built(self, opened: Opened) -> None:
        """The worker has built the task's model."""
        self.metrics.probe_samples.set(opened.val_samples)
        self._event_log.write(
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
            self._event_log.write(logging.WARNING, "model", "%s", warning)
        if self.threshold is not None and opened.floor > self.threshold:
            self._event_log.write(
                logging.WARNING,
                "model",
                "with %d validation samples even unrelated models can reach an agreement of %.2f,"
                " above the threshold %.2f: use more validation data",
                opened.val_samples,
                opened.floor,
                self.threshold,
            )

    def restore(self, rounds: Sequence[Mapping[str, Any]]) -> None:
        """Restore everything but the counters from the recorded rounds, after a restart."""
        if not rounds:
            return
        last = rounds[-1]
        self.model, self.local, self.merged = last["model"], last["local"], last["merged"]
        self.harm = {"round": last["round"], **last["harm"]} if last.get("harm") else None
        if last.get("worth"):
            self._set_worth(last["round"], Worth.from_plain(last["worth"]))
        for entry in rounds:
            for verdict in entry["verdicts"]:
                self.peers.judged(entry["round"], verdict)
        self.metrics.last_completed.set(last["time"])
        self.metrics.accepted.set(sum(verdict["accepted"] for verdict in last["verdicts"]))
        self.peers.set_weights(last["verdicts"], self.harm["dropped"] if self.harm else ())
        self._set_quality(LOCAL, self.local)
        self._set_quality(MERGED, self.merged)

    # Rounds.

    def set_phase(self, round: Round, phase: str, waiting: str) -> None:
        """Set the current round and phase; called on every event, logs only changes."""
        now = time.monotonic()
        if phase != self.phase:
            self._next_phase(phase, now)
        self.metrics.round.set(round)
        self._event_log.round, self._event_log.phase, self.waiting = round, phase, waiting
        # A countdown alone is no change.
        text = re.sub(r"[\d.]+ s\b", "", waiting)
        logged, logged_at = self._phase_logged
        if text != logged or (phase == "collecting" and now - logged_at > WAITING_REPEAT_S):
            self._phase_logged = (text, now)
            self._phase_lines += 1
            limit = PHASE_LINES_MAX + 2 * len(self.peers)
            changed = text != logged and self._phase_lines <= limit
            level = logging.INFO if changed else logging.DEBUG
            self._event_log.write(level, "phase", "%s", waiting)
        self.report_suppressed()

    def _next_phase(self, phase: str, now: float) -> None:
        self.metrics.phase.labels(self.phase).set(0)
        self.metrics.phase.labels(phase).set(1)
        if self.phase in WORKING:
            self.metrics.phase_duration.labels(self.phase).observe(now - self._phase_since)
        if phase == "training":
            self._round_since = now
        self._phase_since = now
        self._phase_lines = 0
        self.progress = None
        self.current_jobs.end_job()

    def report_suppressed(self) -> None:
        """Log how many lines were suppressed; call often."""
        self._event_log.report_suppressed(self.peers)

    def trained(self, round: Round, metrics: Mapping[str, float]) -> None:
        self.local = dict(metrics)
        self._set_quality(LOCAL, metrics)
        text = "round %d: trained, %s"
        self._event_log.write(logging.INFO, "trained", text, round, _numbers(metrics))

    def scored(self, seconds: float) -> None:
        """The updates of a round have been judged."""
        self.metrics.score_duration.observe(seconds)

    def decided(self, round: Round, why: str, verdicts: Sequence[Verdict]) -> None:
        self.metrics.accepted.set(sum(verdict.accepted for verdict in verdicts))
        self.metrics.degraded.set(0)
        for verdict in verdicts:
            self.metrics.verdicts.of(verdict.peer, verdict.fate, verdict.reason).inc()
            self.peers.judged(round, asdict(verdict))
        texts = ", ".join(_verdict_text(verdict) for verdict in verdicts)
        text = "round %d: closed, %s: %s"
        self._event_log.write(logging.INFO, "closed", text, round, why, texts)

    def committed(
        self,
        round: Round,
        model: str,
        metrics: Mapping[str, float],
        harm: Harm | None = None,
        verdicts: Sequence[PlainVerdict] = (),
        left_out: Sequence[PeerName] = (),
    ) -> None:
        """A round is complete.

        `verdicts` come from the journal: the round may have been decided before a restart.
        `left_out` were accepted, but their files could not be read for the merge.
        """
        if left_out:
            text = "round %d: merged without %s, whose files could not be read any more"
            self._event_log.write(logging.WARNING, "left_out", text, round, ", ".join(left_out))
            verdicts = [verdict for verdict in verdicts if verdict["peer"] not in left_out]
        self.model, self.merged = model, dict(metrics)
        self.harm = {"round": round, **asdict(harm)} if harm is not None else None
        if harm is not None and harm.dropped:
            self._dropped(round, harm)
        self.peers.set_weights(verdicts, harm.dropped if harm is not None else ())
        self._set_quality(MERGED, metrics)
        self.metrics.rounds_total.labels(_outcome(verdicts, harm)).inc()
        self.metrics.last_completed.set_to_current_time()
        if self._round_since is not None:
            self.metrics.round_duration.observe(time.monotonic() - self._round_since)
            self._round_since = None
        text = "round %d: merged, %s"
        self._event_log.write(logging.INFO, "merged", text, round, _numbers(metrics))

    def compared(self, round: Round, worth: Worth | None) -> None:
        """The merged model was compared with the one that never merges, if there is one."""
        self.worth = None
        if worth is None:
            return
        before = self._serving
        self._set_worth(round, worth)
        changed = before is not None and before is not worth.served
        level = logging.WARNING if changed else logging.INFO
        self._event_log.write(level, "worth", "round %d: %s", round, worth.description())

    def _set_worth(self, round: int, worth: Worth) -> None:
        self._serving = worth.served
        self.worth = {"round": round, **worth.to_plain()}
        self._set_quality(ALONE, worth.alone)
        self.metrics.federation_gain.labels("mean").set(worth.gain)
        self.metrics.federation_gain.labels("standard_error").set(worth.error)
        self.metrics.serving_federated.set(worth.served is Served.FEDERATED)

    def _dropped(self, round: Round, harm: Harm) -> None:
        for peer in harm.dropped:
            self.metrics.merge_dropped.of(peer).inc()
        self.metrics.reverts.inc(harm.kept_local)
        self._event_log.write(logging.WARNING, "harm", "round %d: %s", round, harm.description())

    def degraded(self, text: str) -> None:
        self.metrics.degraded.set(1)
        self._event_log.write(logging.WARNING, "degraded", "%s", text)

    def left_out(self, text: str, peers: Sequence[PeerName]) -> None:
        self.peers.left_out(peers)
        self._event_log.write(logging.WARNING, "left_out", "%s", text)

    def finished(self, rounds: int, model: str) -> None:
        text = "all %d rounds are done; our model is %s"
        self._event_log.write(logging.INFO, "finished", text, rounds, model)

    def noted(
        self, kind: str, about: Mapping[str, Any], paused: bool, quarantined: Collection[PeerName]
    ) -> None:
        """A journal record outside the rounds has changed the node's durable state."""
        self.set_restrictions(paused, quarantined)
        if kind != "witness":
            fields = ", ".join(f"{key} {value}" for key, value in about.items())
            text = f": {fields}" if fields else ""
            self._event_log.write(logging.INFO, kind, "%s%s", kind, text)

    def set_restrictions(self, paused: bool, quarantined: Collection[PeerName]) -> None:
        """Set whether the site is paused, and which peers are quarantined."""
        self.metrics.paused.set(paused)
        self.peers.set_quarantined(quarantined)

    # Machine, journal and settings.

    def disk_low(self, text: str) -> None:
        self.metrics.disk_low.set(1)
        self._event_log.write(logging.WARNING, "disk", "%s", text)

    def disk_recovered(self, text: str) -> None:
        self.metrics.disk_low.set(0)
        self._event_log.write(logging.INFO, "disk", "%s", text)

    def damaged(self, kind: str, problem: str) -> None:
        """The hash of a stored weights file does not match its name: our own disk failed.

        The same problem is logged once.
        """
        if self._damaged.get(kind) == problem:
            return
        self._damaged[kind] = problem
        self.metrics.damaged.labels(kind).inc()
        text = "a stored update is damaged and not used (%s): check the disk of the state directory"
        self._event_log.write(logging.WARNING, "damaged", text, problem)

    def descriptors_low(self, text: str) -> None:
        self.metrics.descriptors_low.set(1)
        self._event_log.write(logging.WARNING, "descriptors", "%s", text)

    def descriptors_recovered(self, text: str) -> None:
        self.metrics.descriptors_low.set(0)
        self._event_log.write(logging.INFO, "descriptors", "%s", text)

    def connections_closed(self, closed: int) -> None:
        """Unidentified connections closed since the last call, often none."""
        now = time.monotonic()
        if closed:
            self.metrics.crowded_out.inc(closed)
            if not self._flood:
                text = "too many unidentified connections: the oldest are closed, rounds go on"
                self._event_log.write(logging.WARNING, "crowd", text)
            self._flood, self._flood_at = self._flood + closed, now
        elif self._flood and now - self._flood_at > FLOOD_OVER_S:
            text = "no longer too many unidentified connections: %d were closed"
            self._event_log.write(logging.INFO, "crowd", text, self._flood)
            self._flood = 0

    def worker_restarted(self, reason: str, why: str) -> None:
        self.metrics.worker_restarts.labels(reason).inc()
        self._event_log.write(logging.WARNING, "worker", "%s; starting another", why)

    def job_failed(self, round: Round, what: str, problem: LightyearError, pause_s: float) -> None:
        """A job has failed several times in a row; it is tried again after the pause."""
        self.failure = f"round {round}: {what} fails: {problem}"
        hint = f"; what to do: {problem.hint}" if problem.hint else ""
        text = "%s%s; the next attempt is in %s"
        pause = duration(pause_s)
        self._event_log.write(logging.ERROR, "failing", text, self.failure, hint, pause)

    def journal_holds(self) -> None:
        """The journal is consistent in itself; a peer's proof to the contrary takes precedence."""
        if self._journal_broken is None:
            self.metrics.chain_valid.set(1)

    def journal_broken(self, about: str, by: PeerName | None = None) -> None:
        """Our journal is invalid; `by` is the peer that has shown it, if any."""
        if about == self._journal_broken:
            return
        self._journal_broken = about
        self.metrics.chain_valid.set(0)
        self._event_log.write(logging.ERROR, "journal", "%s", about, peer=by)

    def settings_read(self, usable: bool) -> None:
        self.metrics.reload_successful.set(usable)

    def reconfigured(
        self, what: str, expires: float, members: Collection[PeerName], rounds: int | None = None
    ) -> None:
        """The settings have changed; `members` are the peers now in peers.yaml."""
        self._event_log.write(logging.INFO, "settings", "settings changed: %s", what)
        self.metrics.certificate_expiry.set(expires)
        if rounds is not None:
            self.metrics.rounds_configured.set(rounds)
        self.peers.set_members(members)

    # Status.

    def status(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "phase": self.phase,
            "waiting": self.waiting,
            "finished": self.phase == "finished",
            "progress": self.progress,
            **self.current_jobs.to_plain(),
            "model": self.model,
            "metrics": {"local": self.local, "merged": self.merged},
            "harm": self.harm,
            "worth": self.worth,
            "bytes": self.peers.traffic_to_plain(),
            "peers": self.peers.to_plain(),
        }

    def _set_quality(self, stage: str, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if name == "loss":
                self.metrics.local_loss.labels(stage).set(value)
            else:
                self.metrics.local_metric.labels(name, stage).set(value)


def _outcome(verdicts: Sequence[PlainVerdict], harm: Harm | None) -> RoundOutcome:
    fates = {fate(verdict["accepted"], verdict["reason"]) for verdict in verdicts}
    if Fate.ACCEPTED in fates:
        return (
            RoundOutcome.KEPT_LOCAL if harm is not None and harm.kept_local else RoundOutcome.MERGED
        )
    return RoundOutcome.NONE_ACCEPTED if Fate.REJECTED in fates else RoundOutcome.ALONE


def _numbers(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in sorted(metrics.items()))


def _verdict_text(verdict: Verdict) -> str:
    score = f" (agreement {verdict.score:.2f})" if verdict.score is not None else ""
    match verdict.fate:
        case Fate.ACCEPTED:
            return f"{verdict.peer} accepted{score}"
        case Fate.MISSING:
            return f"{verdict.peer} missing ({verdict.reason})"
        case Fate.REJECTED:
            return f"{verdict.peer} REJECTED as {verdict.reason}{score}"
