"""Everything that a node's observer can be told, for tests and for promtool."""

from __future__ import annotations

import io
import logging
from dataclasses import asdict

from lightyear_node.barrier import Phase
from lightyear_node.observe.metrics import DENIALS, RESTARTS, STRANGERS, Metrics
from lightyear_node.observe.observer import Observer
from lightyear_node.observe.peers import PeerView
from lightyear_node.records import (
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
    return Observer(metrics, logger, {B: PeerView(), C: PeerView()}, 0.6)


def everything_happens(watched: Observer, **metrics: float) -> None:
    """Every event there is; `metrics` are those of the site's own task."""
    watched.introduce(Opened("cpu", 1, 10, 20, "fc", 0.1))
    for phase in PHASES:
        watched.at(Round(1), phase, phase)
    watched.trained(Round(1), {"loss": 1.0, **metrics})
    watched.scored(1.0)
    for reason in Reason:
        accepted = reason in (Reason.OK, Reason.CAUGHT_UP)
        watched.decided(Round(1), "", [Verdict(B, accepted, reason, score=0.5)])
        if not accepted:
            watched.refused(B, reason, "")
            watched.transfer_failed(B, reason, "")
    for reason in (Reason.TIMEOUT, Reason.TRUNCATED):
        watched.sending_failed(B, reason)
    for denial in DENIALS:
        watched.denied(B, denial)
    for stranger in STRANGERS:
        watched.denied(None, stranger)
    for restart in RESTARTS:
        watched.worker_restarted(restart, "")
    harm = Harm(0.5, 0.4, (Attempt((), 0.9),), (B,), kept_local=True)
    watched.committed(Round(1), "m", {"loss": 0.9}, harm, [asdict(ACCEPTED)])
    for direction in ("received", "sent"):
        watched.transferred(B, direction, Transfer(10, 5, 1.0))
    watched.resumed(B)
    watched.reached(B, 1, "training")
    watched.called(B, 1, "training")
    watched.sending(B)
    watched.unreachable(B, "")
    watched.left_out("", [B])
    watched.quarantined(B, 1)
    watched.rewritten(B, "")
    watched.accused(B, 1)
    watched.noted("pause", {}, True, {B})
    watched.degraded("")
    watched.disk_low("")
    watched.journal_holds()
    watched.settings_read(False)
