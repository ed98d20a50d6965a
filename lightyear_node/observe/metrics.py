"""The node's Prometheus metrics: names, labels, meaning.

Label values come only from peers.yaml, from our own enumerations and, for the names of local
metrics, from the site's task; never from data of a peer.  Every series exists from the start, at
zero: a counter that appears only with the first failure cannot be alerted on.  Values that have not
been measured yet are NaN, for which no threshold comparison is true.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from functools import partial
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from lightyear_node.types import PeerName, Reason, fate

MINUTE, HOUR = 60.0, 3600.0
BUCKETS_S = (
    *(0.1, 0.5, 1.0, 5.0, 15.0, 30.0),
    *(MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 30 * MINUTE),
    *(HOUR, 2 * HOUR, 6 * HOUR, 24 * HOUR),
)
"""From the rounds of the demo to those of large models on slow networks."""

WORKING = ("training", "sealing", "collecting", "judging", "merging")
"""The phases of a round."""
LOCAL, MERGED = STAGES = ("local", "merged")
ALONE = "alone"
"""Stage of the model that never merges; only sites with a shadow have it."""
"""Our model after training, and after the merge."""
RECEIVED, SENT = DIRECTIONS = ("received", "sent")
AUTHENTICATION_FAILURES = ("handshake", "unknown_peer", "old_tls", "http_token")
DENIALS = (
    *("too_often", "too_many_calls", "too_many_fetches"),
    *("cooling_down", "malformed", "slow_reader"),
)
DAMAGED = ("update", "base", "own")
"""A peer's update, the base of a delta, our own update."""
RESTARTS = ("died", "silent", "failed")

_JUDGING_REASONS = frozenset(
    {
        *(Reason.OK, Reason.CAUGHT_UP, Reason.AGREEMENT_BELOW_TAU, Reason.TOO_FAR),
        *(Reason.LOSS_REGRET, Reason.OUTLIER, Reason.OTHER_CLUSTER, Reason.NOT_SELECTED),
        *(Reason.REFUSED_BY_RULE, Reason.NONFINITE, Reason.DOMAIN, Reason.UNSCORED),
    }
)
"""Reasons that arise only when an update is judged."""
_REFUSALS = [reason for reason in Reason if reason not in _JUDGING_REASONS]
_VERDICTS = [(fate(reason in (Reason.OK, Reason.CAUGHT_UP), reason), reason) for reason in Reason]
# Only the receiver knows what is wrong with the bytes that arrived.
_TRANSFER_ERRORS = [(RECEIVED, reason) for reason in _REFUSALS]
_TRANSFER_ERRORS += [(SENT, Reason.TIMEOUT), (SENT, Reason.TRUNCATED)]

# Omit the `_created` series of every counter, which only OpenMetrics needs.
disable_created_metrics()  # type: ignore[no-untyped-call]

M = TypeVar("M", Counter, Gauge, Histogram)
P = TypeVar("P", Counter, Gauge)
NO_LABELS: Sequence[tuple[str, ...]] = ((),)


def refusal(reason: Reason) -> Reason:
    """Return the label for a refusal: a peer that refuses us may send any reason."""
    return Reason.MALFORMED if reason in _JUDGING_REASONS else reason


class RoundOutcome(StrEnum):
    """Result of a round."""

    MERGED = "merged"
    """At least one peer's model is part of the new one."""
    KEPT_LOCAL = "kept_local"
    """Peers were accepted, but every merge with them failed the merge check."""
    NONE_ACCEPTED = "none_accepted"
    """Updates arrived, and all were rejected."""
    ALONE = "alone"
    """No update arrived."""


class PeerSeries(Generic[P]):
    """A metric with series for each peer in peers.yaml, and for no other name.

    A peer's series begin at `start` when it is added and end when it is removed.  Later writes for
    a removed peer are ignored: they must not bring its series back.  `labels` are the labels
    besides `peer`, and `values` all combinations that they can have.
    """

    def __init__(
        self,
        kind: type[P],
        name: str,
        about: str,
        registry: CollectorRegistry | None,
        labels: Sequence[str] = (),
        values: Sequence[tuple[str, ...]] = NO_LABELS,
        start: float = 0.0,
    ) -> None:
        self._metric: P = kind(name, about, ("peer", *labels), registry=registry)
        self._ignored: P = kind(name, about, registry=None)
        self._values = frozenset(values)
        self._start = start
        self._peers: set[PeerName] = set()

    def add_peer(self, peer: PeerName) -> None:
        self._peers.add(peer)
        for values in self._values:
            child = self._metric.labels(peer, *values)
            if isinstance(child, Gauge):
                child.set(self._start)

    def remove_peer(self, peer: PeerName) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
            for values in self._values:
                self._metric.remove(peer, *values)

    def of(self, peer: PeerName, *values: str) -> P:
        """Return the series to write to; writes for an unknown peer or value are ignored."""
        if peer not in self._peers or values not in self._values:
            return self._ignored
        return self._metric.labels(peer, *values)


class Metrics:
    """All metrics; without `quality`, those that reveal how well a model performs are hidden."""

    def __init__(
        self,
        peers: Iterable[PeerName],
        phases: Iterable[str],
        version: str,
        rounds: int,
        *,
        quality: bool = True,
    ) -> None:
        self.registry = CollectorRegistry()
        self._quality_registry = self.registry if quality else None
        self._per_peer: list[PeerSeries[Counter] | PeerSeries[Gauge]] = []
        self._define_rounds(phases)
        self._define_peers()
        self._define_transfers()
        self._define_quality()
        self._define_trust()
        self._define_machine(version)
        self.rounds_configured.set(rounds)
        names = list(peers)
        self.configured.set(len(names))
        for peer in names:
            self.add_peer(peer)

    def add_peer(self, peer: PeerName) -> None:
        for series in self._per_peer:
            series.add_peer(peer)

    def remove_peer(self, peer: PeerName) -> None:
        for series in self._per_peer:
            series.remove_peer(peer)

    def _define_rounds(self, phases: Iterable[str]) -> None:
        self.round = self._gauge("round", "The round this site is working on.")
        self.rounds_configured = self._gauge(
            "rounds_configured", "Number of rounds in the federation config."
        )
        self.phase = self._gauge("round_phase", "1 for the current phase.", "phase", phases)
        self.rounds_total = self._counter(
            "rounds", "Rounds this site has completed.", "outcome", RoundOutcome
        )
        self.last_completed = self._gauge(
            "last_round_completed_timestamp_seconds", "Completion time of the last round."
        )
        self.round_duration = self._histogram(
            "round_duration_seconds",
            "Duration of a round, from the start of training to its commit.",
        )
        self.phase_duration = self._histogram(
            "phase_duration_seconds", "Duration of the phases of a round.", "phase", WORKING
        )
        self.waiting = self._gauge(
            "barrier_waiting_seconds", "Time this round has waited for updates of peers."
        )
        self.degraded = self._gauge("degraded", "1 while too few peers are reachable to continue.")
        self.paused = self._gauge("paused", "1 while an operator has paused this site.")
        self.reverts = self._counter(
            "aggregate_reverts",
            "Rounds that kept our own model because every merge failed the check.",
        )

    def _define_peers(self) -> None:
        self.configured = self._gauge("peers_configured", "Peers in peers.yaml besides this site.")
        self.accepted = self._gauge("peers_accepted", "Peers accepted in the last round.")
        self.verdicts = self._peer_counter(
            "peer_verdicts", "Rounds by verdict on the peer.", ("verdict", "reason"), _VERDICTS
        )
        self.streak = self._peer_gauge(
            "peer_consecutive_rejections", "Rounds in a row that the peer was rejected."
        )
        self.left_out = self._peer_counter(
            "peer_left_out", "Rounds closed without the peer although it was reachable."
        )
        self.merge_dropped = self._peer_counter(
            "merge_dropped", "Accepted models dropped from a merge by the merge check."
        )
        self.reachable = self._peer_gauge("peer_reachable", "1 while the peer answers or calls us.")
        self.last_seen = self._peer_gauge(
            "peer_last_seen_timestamp_seconds", "Time of the peer's last message; 0 if none."
        )

    def _define_transfers(self) -> None:
        by_direction = [(direction,) for direction in DIRECTIONS]
        self.bytes = self._peer_counter(
            "transfer_bytes", "Bytes of weights on the wire.", ("direction",), by_direction
        )
        self.raw_bytes = self._peer_counter(
            "transfer_uncompressed_bytes",
            "Bytes of weights before compression.",
            ("direction",),
            by_direction,
        )
        self.transfer_errors = self._peer_counter(
            "transfer_errors", "Transfers that failed.", ("direction", "reason"), _TRANSFER_ERRORS
        )
        self.resumes = self._peer_counter(
            "transfer_resumes", "Interrupted transfers that were resumed."
        )
        self.transfer_duration = self._histogram(
            "transfer_duration_seconds", "Duration of transfers.", "direction", DIRECTIONS
        )

    def _define_quality(self) -> None:
        self.agreement = PeerSeries(
            Gauge,
            "lightyear_peer_agreement",
            "Agreement of the peer's last judged model with ours, from 0 to 1.",
            self._quality_registry,
            start=math.nan,
        )
        self.weight = PeerSeries(
            Gauge,
            "lightyear_peer_weight_ratio",
            "The peer's share in the last merge.",
            self._quality_registry,
        )
        self._per_peer += [self.agreement, self.weight]
        self.threshold = self._gauge("peer_agreement_threshold", "Agreement a peer must reach.")
        self.threshold.set(math.nan)
        self.local_loss = Gauge(
            "lightyear_local_loss",
            "Our model's loss on this site's own data.",
            ["stage"],
            registry=self._quality_registry,
        )
        for stage in STAGES:
            self.local_loss.labels(stage).set(math.nan)
        self.local_metric = Gauge(
            "lightyear_local_metric",
            "Our model's metrics on this site's own data.",
            ["name", "stage"],
            registry=self._quality_registry,
        )
        self.federation_gain = Gauge(
            "lightyear_federation_gain",
            "Score of the federated model minus that of the model trained alone, and its error.",
            ["value"],
            registry=self._quality_registry,
        )
        self.serving_federated = Gauge(
            "lightyear_serving_federated",
            "1 if the federated model is served, 0 if it is the one trained alone.",
            registry=self._quality_registry,
        )
        self.serving_federated.set(math.nan)
        self.score_duration = self._histogram(
            "score_duration_seconds", "Time to judge the updates of a round."
        )
        self.probe_samples = self._gauge(
            "score_probe_samples", "Validation samples that peers' models are judged on."
        )

    def _define_trust(self) -> None:
        self.refusals = self._peer_counter(
            "peer_refusals",
            "Messages and updates of the peer that were refused.",
            ("reason",),
            [(reason,) for reason in _REFUSALS],
        )
        self.denials = self._peer_counter(
            "peer_calls_denied",
            "Calls of the peer that were denied.",
            ("reason",),
            [(reason,) for reason in DENIALS],
        )
        self.equivocations = self._peer_counter(
            "peer_equivocations", "Proofs that the peer signed two updates of one round."
        )
        self.quarantined = self._peer_gauge(
            "peer_quarantined", "1 while the peer is quarantined for equivocation."
        )
        self.rewritten = self._peer_counter(
            "peer_journal_contradictions", "Proofs that the peer has rewritten its journal."
        )
        self.withheld = self._peer_counter(
            "peer_records_withheld",
            "Journal records not written because the peer exceeded its quota.",
        )
        self.accusations = self._counter(
            "accusations", "Proofs from peers that two updates of one round have our signature."
        )
        self.authentication_failures = self._counter(
            "authentication_failures",
            "Calls without a valid identity.",
            "reason",
            AUTHENTICATION_FAILURES,
        )
        self.certificate_expiry = self._gauge(
            "certificate_expiry_timestamp_seconds", "Expiry time of this site's certificate."
        )
        self.records = self._counter("audit_records", "Records written to the journal.")
        self.chain_valid = self._gauge(
            "audit_chain_valid",
            "1 if our journal was valid when last checked; NaN before the first check.",
        )
        self.chain_valid.set(math.nan)

    def _define_machine(self, version: str) -> None:
        build = self._gauge("build_info", "The running version, always 1.", "version", [version])
        build.labels(version).set(1)
        self.worker_up = self._gauge("worker_up", "1 while the worker process is running.")
        self.worker_restarts = self._counter(
            "worker_restarts", "Restarts of the worker process.", "reason", RESTARTS
        )
        self.reload_successful = self._gauge(
            "config_last_reload_successful", "1 if the settings were valid when last read."
        )
        self.reload_successful.set(1)
        self.damaged = self._counter(
            "damaged_files", "Stored weights files found to be damaged.", "kind", DAMAGED
        )
        self.disk_free = self._gauge("disk_free_bytes", "Free space for the state directory.")
        self.log_suppressed = self._counter(
            "log_lines_suppressed", "Log lines suppressed by the hourly limit per peer and kind."
        )
        self.disk_low = self._gauge("disk_low", "1 while the node lacks disk space.")
        self.descriptors_low = self._gauge(
            "descriptors_low", "1 while the node waits for file descriptors."
        )
        self.crowded_out = self._counter(
            "connections_crowded_out", "Connections closed because too many were unidentified."
        )

    def _counter(
        self, name: str, help: str, label: str = "", values: Iterable[str] = ()
    ) -> Counter:
        return self._metric(Counter, name, help, label, values)

    def _gauge(self, name: str, help: str, label: str = "", values: Iterable[str] = ()) -> Gauge:
        return self._metric(Gauge, name, help, label, values)

    def _histogram(
        self, name: str, help: str, label: str = "", values: Iterable[str] = ()
    ) -> Histogram:
        return self._metric(partial(Histogram, buckets=BUCKETS_S), name, help, label, values)

    def _metric(
        self, kind: Callable[..., M], name: str, help: str, label: str, values: Iterable[str]
    ) -> M:
        metric = kind(f"lightyear_{name}", help, [label] if label else [], registry=self.registry)
        for value in values:
            metric.labels(value)
        return metric

    def _peer_counter(
        self,
        name: str,
        help: str,
        labels: Sequence[str] = (),
        values: Sequence[tuple[str, ...]] = NO_LABELS,
    ) -> PeerSeries[Counter]:
        metric = PeerSeries(Counter, f"lightyear_{name}", help, self.registry, labels, values)
        self._per_peer.append(metric)
        return metric

    def _peer_gauge(self, name: str, help: str) -> PeerSeries[Gauge]:
        metric = PeerSeries(Gauge, f"lightyear_{name}", help, self.registry)
        self._per_peer.append(metric)
        return metric
