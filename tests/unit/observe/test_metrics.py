"""Prometheus metrics: which series exist, and how events change them."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from dataclasses import asdict

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lightyear_node.observe.metrics import RoundOutcome
from lightyear_node.observe.observer import Observer
from lightyear_node.types import (
    Attempt,
    Fate,
    Harm,
    PairedScores,
    Reason,
    Round,
    Served,
    Verdict,
    Worth,
    fate,
)
from tests.support.observer_events import (
    ACCEPTED,
    MISSING,
    REJECTED,
    B,
    C,
    observer,
    send_all_events,
)
from tests.support.paths import DOCS

TABLE = DOCS / "monitoring.md"


def series(watched: Observer) -> dict[str, float]:
    """Every series by its name and labels, as Prometheus would read them."""
    text = generate_latest(watched.metrics.registry).decode()
    return {
        sample.name + "{" + ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items())) + "}": (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(watched: Observer, name: str, **labels: str) -> float:
    return series(watched)[
        f"lightyear_{name}" + "{" + ",".join(f"{k}={v}" for k, v in sorted(labels.items())) + "}"
    ]


def test_all_series_exist_from_the_start() -> None:
    watched = observer()
    before = series(watched)
    send_all_events(watched)
    assert series(watched).keys() == before.keys()


def test_counters_begin_at_zero_and_unmeasured_values_are_nan() -> None:
    initial = series(observer())
    constants = {"lightyear_build_info{version=1.2.3}", "lightyear_round_phase{phase=starting}"}
    constants |= {f"lightyear_{name}{{}}" for name in ("rounds_configured", "peers_configured")}
    constants |= {
        "lightyear_peer_agreement_threshold{}",
        "lightyear_config_last_reload_successful{}",
    }
    unknown = {name for name, value in initial.items() if math.isnan(value)}
    assert unknown == {
        "lightyear_peer_agreement{peer=site-b}",
        "lightyear_peer_agreement{peer=site-c}",
        "lightyear_local_loss{stage=local}",
        "lightyear_local_loss{stage=merged}",
        "lightyear_serving_federated{}",
        "lightyear_audit_chain_valid{}",
    }
    assert {name for name, value in initial.items() if value} - unknown == constants


def test_a_removed_peer_has_no_series() -> None:
    watched = observer()
    watched.reconfigured("site-b is removed", 0.0, [C], rounds=30)
    assert not [name for name in series(watched) if "site-b" in name]
    assert of(watched, "peers_configured") == 1
    assert of(watched, "rounds_configured") == 30
    send_all_events(watched)  # late events about it
    assert not [name for name in series(watched) if "site-b" in name]
    watched.reconfigured("site-b is back", 0.0, [B, C])
    assert of(watched, "peer_consecutive_rejections", peer=B) == 0
    watched.peers.quarantined(B, 1)
    assert of(watched, "peer_equivocations_total", peer=B) == 1


def test_without_quality_no_metric_reveals_model_performance() -> None:
    watched = observer(quality=False)
    send_all_events(watched)
    watched.trained(Round(2), {"loss": 1.0, "accuracy": 0.9})
    names = {name.partition("{")[0] for name in series(watched)}
    hidden = {"peer_agreement", "peer_weight_ratio", "local_loss", "local_metric"}
    hidden |= {"federation_gain", "serving_federated"}
    assert not names & {f"lightyear_{name}" for name in hidden}
    watched.trained(Round(2), {"loss": 1.0, "accuracy": 0.9})
    assert watched.status()["metrics"]["local"]["accuracy"] == 0.9, "hidden in metrics only"
    all_names = {name.partition("{")[0] for name in series(observer())}
    unlabelled = {"local_metric", "federation_gain"}  # no series before a value is known
    assert all_names - names == {f"lightyear_{name}" for name in hidden - unlabelled}


@pytest.mark.parametrize(
    ("verdicts", "harm", "outcome"),
    [
        ([ACCEPTED, REJECTED], None, RoundOutcome.MERGED),
        ([ACCEPTED], Harm(0.5, 0.4, (Attempt((), 9.0),), (B,), True), RoundOutcome.KEPT_LOCAL),
        ([REJECTED], None, RoundOutcome.NONE_ACCEPTED),
        ([MISSING], None, RoundOutcome.ALONE),
        ([], None, RoundOutcome.ALONE),
    ],
)
def test_a_round_has_one_outcome(
    verdicts: list[Verdict], harm: Harm | None, outcome: RoundOutcome
) -> None:
    watched = observer()
    watched.committed(Round(1), "m", {}, harm, [asdict(verdict) for verdict in verdicts])
    for one in RoundOutcome:
        assert of(watched, "rounds_total", outcome=one) == (one is outcome)


def test_the_weight_of_a_peer_is_that_of_the_last_merge() -> None:
    watched = observer()
    both = [asdict(ACCEPTED), asdict(Verdict(C, True, Reason.OK, weight=0.25))]
    watched.committed(Round(1), "m", {}, None, both)
    assert of(watched, "peer_weight_ratio", peer=B) == 0.5
    assert of(watched, "peer_weight_ratio", peer=C) == 0.25
    harm = Harm(0.5, 0.4, (Attempt((), 9.0), Attempt((B,), 0.4)), (B,), kept_local=False)
    watched.committed(Round(2), "m", {}, harm, both)
    assert of(watched, "peer_weight_ratio", peer=B) == 0, "it was dropped"
    assert of(watched, "peer_weight_ratio", peer=C) == 0.25
    watched.committed(Round(3), "m", {}, None, [asdict(ACCEPTED)])
    assert of(watched, "peer_weight_ratio", peer=C) == 0


def test_rounds_and_phases_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    watched = observer()

    def after(seconds: float, event: Callable[[], None]) -> None:
        nonlocal now
        now += seconds
        event()

    def phase(name: str) -> Callable[[], None]:
        return lambda: watched.set_phase(Round(1), name, name)

    after(7, phase("observing"))
    after(5, phase("training"))
    after(50, phase("sealing"))
    after(1, phase("collecting"))
    now += 20
    assert of(watched, "barrier_waiting_seconds") == 20
    after(10, phase("judging"))
    assert of(watched, "barrier_waiting_seconds") == 0
    after(3, phase("merging"))
    after(4, lambda: watched.committed(Round(1), "m", {}))
    after(0, phase("training"))
    assert of(watched, "round_duration_seconds_sum") == 50 + 1 + 30 + 3 + 4
    spent = {"training": 50, "sealing": 1, "collecting": 30, "judging": 3, "merging": 4}
    for name, seconds in spent.items():
        assert of(watched, "phase_duration_seconds_sum", phase=name) == seconds
        assert of(watched, "phase_duration_seconds_count", phase=name) == 1


def test_a_round_begun_before_a_restart_has_no_duration() -> None:
    watched = observer()
    watched.set_phase(Round(4), "merging", "merging")
    watched.committed(Round(4), "m", {})
    assert of(watched, "round_duration_seconds_count") == 0
    assert of(watched, "rounds_total", outcome="alone") == 1


def test_a_peers_proof_outweighs_the_self_check_of_the_journal() -> None:
    watched = observer()
    watched.journal_broken("site-b holds a head that is not here")
    watched.journal_holds()
    assert of(watched, "audit_chain_valid") == 0
    other = observer()
    other.journal_holds()
    assert of(other, "audit_chain_valid") == 1


def test_a_repeated_accusation_is_logged_and_counted_once() -> None:
    stream = io.StringIO()
    watched = observer(stream=stream)
    for _ in range(3):
        watched.peers.accused(B, 7)
        watched.peers.accused(C, 7)
    assert of(watched, "accusations_total") == 2
    assert len(stream.getvalue().splitlines()) == 2


def test_withheld_records_are_counted_once() -> None:
    watched = observer()
    for count in (0, 2, 2, 5):
        watched.peers.withheld({B: count})
    assert of(watched, "peer_records_withheld_total", peer=B) == 5
    watched.peers.withheld({B: 1})  # removed and added again
    assert of(watched, "peer_records_withheld_total", peer=B) == 6
    assert of(watched, "peer_records_withheld_total", peer=C) == 0


def test_a_blocked_peer_has_no_rejection_streak() -> None:
    watched = observer()
    for number in range(3):
        watched.decided(Round(number), "all", [Verdict(C, False, Reason.BLOCKED)])
    assert of(watched, "peer_consecutive_rejections", peer=C) == 0
    assert of(watched, "peer_verdicts_total", peer=C, verdict="rejected", reason="blocked") == 3


def test_an_invalid_reason_of_a_refusal_is_counted_as_malformed() -> None:
    """A peer that refuses us sends the reason, and may send any."""
    watched = observer()
    watched.peers.refused(B, Reason.TOO_FAR, "")
    watched.peers.transfer_failed(B, Reason.OUTLIER, "")
    assert of(watched, "peer_refusals_total", peer=B, reason="malformed") == 1
    failed = {"peer": B, "direction": "received", "reason": "malformed"}
    assert of(watched, "transfer_errors_total", **failed) == 1


def test_a_reason_has_the_same_fate_everywhere() -> None:
    """In metrics, status and audit; an update that did not arrive is MISSING, not REJECTED."""
    missing = {reason for reason in Reason if fate(False, reason) is Fate.MISSING}
    assert missing == {
        "unreachable", "timeout", "truncated", "stale_round", "unconfirmed", "disk_full",
        "damaged",
    }  # fmt: skip
    for reason in Reason:
        watched = observer()
        watched.decided(Round(1), "", [Verdict(C, False, reason)])
        assert watched.status()["peers"][1]["verdict"] == fate(False, reason)


def test_the_documented_metrics_and_labels_are_complete() -> None:
    watched = observer()
    watched.trained(Round(1), {"accuracy": 0.9})
    watched.compared(Round(1), Worth("loss", (PairedScores(9, 0.1, 0.1, 0.5),), Served.FEDERATED))
    text = generate_latest(watched.metrics.registry).decode()
    actual = {}
    for family in text_string_to_metric_families(text):
        labels = {label for sample in family.samples for label in sample.labels}
        name = family.name + ("_total" if family.type == "counter" else "")
        actual[name] = labels - {"le"}
    rows = re.findall(r"^\| `lightyear_(\w+)` \|([^|]*)\|", TABLE.read_text(), re.MULTILINE)
    documented = {f"lightyear_{name}": set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}
    assert len(rows) == len(documented), "no duplicates"
    assert documented == actual
