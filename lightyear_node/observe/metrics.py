"""The node's Prometheus metrics: their names, labels and what they mean.

Label values come only from peers.yaml, from our own enumerations and, for the names of its own
metrics, from the site's task; never from anything a peer can choose.  Every series exists from the
start, at zero: a counter that appears only with the first failure cannot be alerted on.  What has
not been measured yet is NaN, which no threshold is above or below.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from lightyear_node.observe.series import NO_LABELS, PerPeer
from lightyear_node.records import PeerName, Reason, fate

MINUTE, HOUR = 60.0, 3600.0
BUCKETS_S = (
    *(0.1, 0.5, 1.0, 5.0, 15.0, 30.0),
    *(MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 30 * MINUTE),
    *(HOUR, 2 * HOUR, 6 * HOUR, 24 * HOUR),
)
"""From the demo's rounds to those of large models on narrow lines."""

WORKING = ("training", "sealing", "collecting", "judging", "merging")
"""The phases of which a round consists."""
LOCAL, MERGED = STAGES = ("local", "merged")
"""Our model after training, and after merging it with the others'."""
RECEIVED, SENT = DIRECTIONS = ("received", "sent")
STRANGERS = ("handshake", "unknown_peer", "old_tls", "http_token")
DENIALS = (
    *("too_often", "too_many_calls", "too_many_fetches"),
    *("cooling_down", "malformed", "slow_reader"),
)
RESTARTS = ("died", "silent", "failed")

_OF_JUDGING = frozenset(
    {
        *(Reason.OK, Reason.CAUGHT_UP, Reason.AGREEMENT_BELOW_TAU, Reason.TOO_FAR),
        *(Reason.LOSS_REGRET, Reason.OUTLIER, Reason.OTHER_CLUSTER, Reason.NOT_SELECTED),
        *(Reason.REFUSED_BY_RULE, Reason.NONFINITE, Reason.DOMAIN, Reason.UNSCORED),
    }
)
"""What nobody is refused for before its model is here."""
_REFUSALS = [reason for reason in Reason if reason not in _OF_JUDGING]
_VERDICTS = [(fate(reason in (Reason.OK, Reason.CAUGHT_UP), reason), reason) for reason in Reason]
# What was wrong with bytes that have arrived only the receiver can say.
_TRANSFER_ERRORS = [(RECEIVED, reason) for reason in _REFUSALS]
_TRANSFER_ERRORS += [(SENT, Reason.TIMEOUT), (SENT, Reason.TRUNCATED)]

# A second series for every counter, saying when it was created: noise to everybody but OpenMetrics.
disable_created_metrics()  # type: ignore[no-untyped-call]

M = TypeVar("M", Counter, Gauge, Histogram)


def refusal(reason: Reason) -> Reason:
    """As what a refusal is counted: a peer may claim any reason when it refuses us."""
    return Reason.MALFORMED if reason in _OF_JUDGING else reason


class Outcome(StrEnum):
    """What became of a round."""

    MERGED = "merged"
    """At least one peer's model is part of the new one."""
    KEPT_LOCAL = "kept_local"
    """Peers were accepted, but merging with any of them did harm."""
    NONE_ACCEPTED = "none_accepted"
    """There were updates, and all of them were rejected."""
    ALONE = "alone"
    """There was no update of anybody."""


class Metrics:
    """Without `quality`, nothing here says how well any model does, our own or a peer's."""

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
        self._shown_quality = self.registry if quality else None
        self._per_peer: list[PerPeer[Counter] | PerPeer[Gauge]] = []
        self._define_rounds(phases)
        self._define_peers()
        self._define_transfers()
        self._define_quality()
        self._define_trust()
        self._define_machine(version)
        self.rounds_configured.set(rounds)
        here = list(peers)
        self.configured.set(len(here))
        for peer in here:
            self.admit(peer)

    def admit(self, peer: PeerName) -> None:
        for series in self._per_peer:
            series.admit(peer)

    def dismiss(self, peer: PeerName) -> None:
        """It is no longer in peers.yaml."""
        for series in self._per_peer:
            series.dismiss(peer)

    def _define_rounds(self, phases: Iterable[str]) -> None:
        self.round = self._gauge("round", "The federation round this site is working on.")
        self.rounds_configured = self._gauge("rounds_configured", "Rounds the federation will run.")
        self.phase = self._gauge("round_phase", "1 for the current phase.", "phase", phases)
        self.rounds_total = self._counter(
            "rounds", "Rounds this site has completed.", "outcome", Outcome
        )
        self.last_completed = self._gauge(
            "last_round_completed_timestamp_seconds", "When the last round was completed."
        )
        self.round_duration = self._histogram(
            "round_duration_seconds", "From the beginning of a round's training to its end."
        )
        self.phase_duration = self._histogram(
            "phase_duration_seconds", "How long a round's phases took.", "phase", WORKING
        )
        self.waiting = self._gauge(
            "barrier_waiting_seconds", "How long this round has waited for updates of peers."
        )
        self.degraded = self._gauge("degraded", "1 while too few peers are here to go on.")
        self.paused = self._gauge("paused", "1 while an operator has paused this site.")
        self.reverts = self._counter(
            "aggregate_reverts", "Rounds that kept our own model because merging did harm."
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
            "peer_left_out", "Rounds closed without the peer although it was there."
        )
        self.merge_dropped = self._peer_counter(
            "merge_dropped", "Accepted models left out of a merge that would have done harm."
        )
        self.reachable = self._peer_gauge("peer_reachable", "1 while the peer answers or calls.")
        self.last_seen = self._peer_gauge(
            "peer_last_seen_timestamp_seconds", "When the peer was last heard; 0 for never."
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
            "transfer_resumes", "Transfers that broke off and went on from where they were."
        )
        self.transfer_duration = self._histogram(
            "transfer_duration_seconds", "How long transfers took.", "direction", DIRECTIONS
        )

    def _define_quality(self) -> None:
        self.agreement = PerPeer(
            Gauge,
            "lightyear_peer_agreement",
            "Agreement of the peer's last judged model with ours, from 0 to 1.",
            self._shown_quality,
            start=math.nan,
        )
        self.weight = PerPeer(
            Gauge,
            "lightyear_peer_weight_ratio",
            "The peer's share in the last merge.",
            self._shown_quality,
        )
        self._per_peer += [self.agreement, self.weight]
        self.threshold = self._gauge("peer_agreement_threshold", "Agreement a peer must reach.")
        self.threshold.set(math.nan)
        self.local_loss = Gauge(
            "lightyear_local_loss",
            "Our model's loss on this site's own data.",
            ["stage"],
            registry=self._shown_quality,
        )
        for stage in STAGES:
            self.local_loss.labels(stage).set(math.nan)
        self.local_metric = Gauge(
            "lightyear_local_metric",
            "Our model's metrics on this site's own data.",
            ["name", "stage"],
            registry=self._shown_quality,
        )
        self.score_duration = self._histogram(
            "score_duration_seconds", "How long judging the updates of a round took."
        )
        self.probe_samples = self._gauge(
            "score_probe_samples", "Validation samples that peers' models are judged on."
        )

    def _define_trust(self) -> None:
        self.refusals = self._peer_counter(
            "peer_refusals",
            "What the peer said and was refused for.",
            ("reason",),
            [(reason,) for reason in _REFUSALS],
        )
        self.denials = self._peer_counter(
            "peer_calls_denied",
            "Calls of the peer that were not answered.",
            ("reason",),
            [(reason,) for reason in DENIALS],
        )
        self.equivocations = self._peer_counter(
            "peer_equivocations", "Proofs that the peer signed two updates of one round."
        )
        self.quarantined = self._peer_gauge(
            "peer_quarantined", "1 while the peer is in quarantine for two stories."
        )
        self.rewritten = self._peer_counter(
            "peer_journal_contradictions", "Proofs that the peer has rewritten its journal."
        )
        self.accusations = self._counter(
            "accusations", "Proofs of peers that two updates of one round bear our signature."
        )
        self.authentication_failures = self._counter(
            "authentication_failures", "Calls without a valid identity.", "reason", STRANGERS
        )
        self.certificate_expiry = self._gauge(
            "certificate_expiry_timestamp_seconds", "When this site's certificate ends."
        )
        self.records = self._counter("audit_records", "Records written to the journal.")
        self.chain_valid = self._gauge(
            "audit_chain_valid", "Whether our journal held when last checked; NaN before that."
        )
        self.chain_valid.set(math.nan)

    def _define_machine(self, version: str) -> None:
        build = self._gauge("build_info", "The running version, always 1.", "version", [version])
        build.labels(version).set(1)
        self.worker_up = self._gauge("worker_up", "1 while the worker process runs.")
        self.worker_restarts = self._counter(
            "worker_restarts", "Times the worker was replaced.", "reason", RESTARTS
        )
        self.reload_successful = self._gauge(
            "config_last_reload_successful", "1 if the settings could be used when last read."
        )
        self.reload_successful.set(1)
        self.disk_free = self._gauge("disk_free_bytes", "Free space for the state directory.")
        self.disk_low = self._gauge("disk_low", "1 while the node lacks space on its disk.")

    def _counter(
        self, name: str, about: str, label: str = "", values: Iterable[str] = ()
    ) -> Counter:
        return self._made(Counter, name, about, label, values)

    def _gauge(self, name: str, about: str, label: str = "", values: Iterable[str] = ()) -> Gauge:
        return self._made(Gauge, name, about, label, values)

    def _histogram(
        self, name: str, about: str, label: str = "", values: Iterable[str] = ()
    ) -> Histogram:
        labels = [label] if label else []
        made = Histogram(
            f"lightyear_{name}", about, labels, registry=self.registry, buckets=BUCKETS_S
        )
        for value in values:
            made.labels(value)
        return made

    def _made(self, kind: type[M], name: str, about: str, label: str, values: Iterable[str]) -> M:
        made = kind(f"lightyear_{name}", about, [label] if label else [], registry=self.registry)
        for value in values:
            made.labels(value)
        return made

    def _peer_counter(
        self,
        name: str,
        about: str,
        labels: Sequence[str] = (),
        values: Sequence[tuple[str, ...]] = NO_LABELS,
    ) -> PerPeer[Counter]:
        made = PerPeer(Counter, f"lightyear_{name}", about, self.registry, labels, values)
        self._per_peer.append(made)
        return made

    def _peer_gauge(self, name: str, about: str) -> PerPeer[Gauge]:
        made = PerPeer(Gauge, f"lightyear_{name}", about, self.registry)
        self._per_peer.append(made)
        return made
