"""The node's Prometheus metrics.

Label values come only from peers.yaml and from our own enumerations, never from anything a peer
can choose, and every series exists from the start at zero: a counter that appears only with the
first failure cannot be alerted on.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics

from lightyear_node.records import PeerName, Reason

DIRECTIONS = ("received", "sent")

# A second series for every counter, saying when it was created: noise to everybody but OpenMetrics.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    def __init__(
        self, peers: Iterable[PeerName], phases: Iterable[str], version: str, rounds: int
    ) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"lightyear_{name}", about, labels, registry=registry)

        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return Gauge(f"lightyear_{name}", about, labels, registry=registry)

        build = gauge("build_info", "The running version, always 1.", "version")
        build.labels(version).set(1)
        self.round = gauge("round", "The federation round this site is working on.")
        self.rounds_configured = gauge("rounds_configured", "Rounds the federation will run.")
        self.rounds_configured.set(rounds)
        self.phase = gauge("round_phase", "1 for the current phase of the round.", "phase")
        self.rounds_total = counter("rounds", "Rounds this site has completed.")
        self.last_completed = gauge(
            "last_round_completed_timestamp_seconds", "When the last round was completed."
        )
        self.verdicts = counter(
            "peer_verdicts", "Updates judged, by verdict and reason.", "peer", "verdict", "reason"
        )
        self.agreement = gauge(
            "peer_agreement", "NTK agreement of the peer's last judged model.", "peer"
        )
        self.threshold = gauge("peer_agreement_threshold", "Agreement a peer must reach.")
        self.streak = gauge(
            "peer_consecutive_rejections", "Rounds in a row that the peer was rejected.", "peer"
        )
        self.reachable = gauge("peer_reachable", "1 while the peer answers.", "peer")
        self.accepted = gauge("peers_accepted", "Peers accepted in the last round.")
        self.merge_dropped = counter(
            "merge_dropped",
            "Accepted models left out of a merge that would have done harm.",
            "peer",
        )
        self.kept_local = counter(
            "merges_kept_local", "Rounds whose merge did harm whoever was left out."
        )
        self.configured = gauge("peers_configured", "Peers in peers.yaml besides this site.")
        self.bytes = counter("transfer_bytes", "Bytes of weights on the wire.", "peer", "direction")
        self.raw_bytes = counter(
            "transfer_uncompressed_bytes", "Bytes of weights before compression.",
            "peer", "direction",
        )  # fmt: skip
        self.transfer_errors = counter(
            "transfer_errors", "Transfers that failed, by reason.", "peer", "reason"
        )
        self.refusals = counter(
            "peer_refusals", "Messages refused before judging, by reason.", "peer", "reason"
        )
        self.authentication_failures = counter(
            "authentication_failures", "Calls refused for lack of a valid identity.", "reason"
        )
        self.certificate_expiry = gauge(
            "certificate_expiry_timestamp_seconds", "When this site's certificate ends."
        )
        self.records = counter("audit_records", "Records written to the journal.")
        self.worker_up = gauge("worker_up", "1 while the worker process runs.")
        self.worker_restarts = counter("worker_restarts", "Times the worker had to be restarted.")
        self.local_metric = gauge(
            "local_metric", "The model's metrics on this site's own data.", "name", "stage"
        )
        self.disk_free = gauge("disk_free_bytes", "Free space on the state directory's disk.")
        self.disk_low = gauge("disk_low", "1 while the node lacks space on its disk.")
        self.degraded = gauge("degraded", "1 while too few peers are here to close the round.")
        self.left_out = counter(
            "peer_left_out", "Rounds closed without a peer that was there.", "peer"
        )
        self.quarantined = gauge(
            "peer_quarantined", "1 while the peer is in quarantine for two stories.", "peer"
        )
        self.paused = gauge("paused", "1 while an operator has paused this site.")
        self.authentication_failures.labels("handshake")
        self._start_at_zero(list(peers), list(phases))

    def _start_at_zero(self, peers: list[PeerName], phases: list[str]) -> None:
        self.configured.set(len(peers))
        for phase in phases:
            self.phase.labels(phase).set(0)
        for peer in peers:
            self.admit(peer)

    def admit(self, peer: PeerName) -> None:
        self.reachable.labels(peer).set(0)
        self.streak.labels(peer).set(0)
        self.left_out.labels(peer)
        self.merge_dropped.labels(peer)
        self.quarantined.labels(peer).set(0)
        for direction in DIRECTIONS:
            self.bytes.labels(peer, direction)
            self.raw_bytes.labels(peer, direction)
        for reason in Reason:
            self.verdicts.labels(peer, _verdict_of(reason), reason)
            self.transfer_errors.labels(peer, reason)
            self.refusals.labels(peer, reason)


def _verdict_of(reason: Reason) -> str:
    """Which verdict a reason usually goes with; other pairs appear when they happen."""
    if reason in (Reason.OK, Reason.CAUGHT_UP):
        return "accepted"
    absent = (Reason.UNREACHABLE, Reason.TIMEOUT, Reason.DISK_FULL)
    return "missing" if reason in absent else "rejected"
