"""An observer, and one event of every kind, for tests and for promtool."""

from __future__ import annotations

import io
import logging
from dataclasses import asdict

from lightyear_node.observe.metrics import AUTHENTICATION_FAILURES, DENIALS, RESTARTS, Metrics
from lightyear_node.observe.observer import Observer
from lightyear_node.protocol.parameters import Phase
from lightyear_node.types import (
    Attempt,
    Digest,
    Harm,
    Opened,
    PeerName,
    Reason,
    Round,
    Transfer,
    Verdict,
)

B, C = PeerName("site-b"), PeerName("site-c")
DIGEST = Digest("0" * 64)
PHASES = [*Phase, "starting"]
ACCEPTED = Verdict(B, True, Reason.OK, score=0.9, weight=0.5, digest=DIGEST)
REJECTED = Verdict(C, False, Reason.TOO_FAR, score=0.4, digest=DIGEST)
MISSING = Verdict(C, False, Reason.TIMEOUT)


def observer(*, quality: bool = True, stream: io.StringIO | None = None) -> Observer:
    logger = logging.Logger("test")
    if stream is not None:
        logger.addHandler(logging.StreamHandler(stream))
    metrics = Metrics([B, C], PHASES, "1.2.3", 20, quality=quality)
    return Observer(metrics, logger, [B, C], 0.6)


def send_all_events(watched: Observer, **metrics: float) -> None:
    """Send every kind of event; `metrics` are those of the site's task."""
    watched.model_built(Opened("cpu", 1, 10, 20, "fc", 0.1))
    for phase in PHASES:
        watched.set_phase(Round(1), phase, phase)
    watched.trained(Round(1), {"loss": 1.0, **metrics})
    watched.scored(1.0)
    for reason in Reason:
        accepted = reason in (Reason.OK, Reason.CAUGHT_UP)
        watched.decided(Round(1), "", [Verdict(B, accepted, reason, score=0.5)])
        if not accepted:
            watched.peers.refused(B, reason, "")
            watched.peers.transfer_failed(B, reason, "")
    for reason in (Reason.TIMEOUT, Reason.TRUNCATED):
        watched.peers.sending_failed(B, reason)
    for denial in DENIALS:
        watched.peers.denied(B, denial)
    for failure in AUTHENTICATION_FAILURES:
        watched.peers.denied(None, failure)
    for restart in RESTARTS:
        watched.worker_restarted(restart, "")
    harm = Harm(0.5, 0.4, (Attempt((), 0.9),), (B,), kept_local=True)
    watched.committed(Round(1), "m", {"loss": 0.9}, harm, [asdict(ACCEPTED)])
    for direction in ("received", "sent"):
        watched.peers.transferred(B, direction, Transfer(10, 5, 1.0))
    watched.peers.resumed(B)
    watched.peers.reached(B, 1, "training")
    watched.peers.called(B, 1, "training")
    watched.peers.sending(B)
    watched.peers.unreachable(B, "")
    watched.left_out("", [B])
    watched.peers.quarantined(B, 1)
    watched.peers.rewritten(B, "")
    watched.peers.accused(B, 1)
    watched.noted("pause", {}, True, {B})
    watched.degraded("")
    watched.disk_low("")
    watched.journal_holds()
    watched.settings_read(False)
