"""What Prometheus is told: which series there are, and what moves them."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lightyear_node.observe.metrics import Outcome
from lightyear_node.observe.observer import Observer
from lightyear_node.records import Attempt, Fate, Harm, Reason, Round, Verdict, fate
from tests.unit.happenings import (
    ACCEPTED,
    MISSING,
    REJECTED,
    B,
    C,
    everything_happens,
    observer,
)

TABLE = Path(__file__).parents[2] / "docs" / "monitoring.md"


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


def test_no_series_appears_that_was_not_there_from_the_start() -> None:
    watched = observer()
    before = series(watched)
    everything_happens(watched)
    assert series(watched).keys() == before.keys()


def test_what_is_counted_begins_at_zero_and_what_was_not_measured_is_no_number() -> None:
    begins = series(observer())
    about_us = {"lightyear_build_info{version=1.2.3}", "lightyear_round_phase{phase=starting}"}
    about_us |= {f"lightyear_{name}{{}}" for name in ("rounds_configured", "peers_configured")}
    about_us |= {
        "lightyear_peer_agreement_threshold{}",
        "lightyear_config_last_reload_successful{}",
    }
    unknown = {name for name, value in begins.items() if math.isnan(value)}
    assert unknown == {
        "lightyear_peer_agreement{peer=site-b}",
        "lightyear_peer_agreement{peer=site-c}",
        "lightyear_local_loss{stage=local}",
        "lightyear_local_loss{stage=merged}",
        "lightyear_audit_chain_valid{}",
    }
    assert {name for name, value in begins.items() if value} - unknown == about_us


def test_a_peer_that_leaves_takes_its_series_along() -> None:
    watched = observer()
    watched.reconfigured("site-b is removed", 0.0, [C], rounds=30)
    assert not [name for name in series(watched) if "site-b" in name]
    assert of(watched, "peers_configured") == 1
    assert of(watched, "rounds_configured") == 30
    everything_happens(watched)  # its last words, and ours about it
    assert not [name for name in series(watched) if "site-b" in name]
    watched.reconfigured("site-b is back", 0.0, [B, C])
    assert of(watched, "peer_consecutive_rejections", peer=B) == 0
    watched.quarantined(B, 1)
    assert of(watched, "peer_equivocations_total", peer=B) == 1


def test_without_quality_nothing_tells_how_well_a_model_does() -> None:
    watched = observer(quality=False)
    everything_happens(watched)
    watched.trained(Round(2), {"loss": 1.0, "accuracy": 0.9})
    names = {name.partition("{")[0] for name in series(watched)}
    hidden = {"peer_agreement", "peer_weight_ratio", "local_loss", "local_metric"}
    assert not names & {f"lightyear_{name}" for name in hidden}
    watched.trained(Round(2), {"loss": 1.0, "accuracy": 0.9})
    assert watched.status()["metrics"]["local"]["accuracy"] == 0.9, "only metrics hide it"
    all_names = {name.partition("{")[0] for name in series(observer())}
    assert all_names - names == {f"lightyear_{name}" for name in hidden - {"local_metric"}}


@pytest.mark.parametrize(
    ("verdicts", "harm", "outcome"),
    [
        ([ACCEPTED, REJECTED], None, Outcome.MERGED),
        ([ACCEPTED], Harm(0.5, 0.4, (Attempt((), 9.0),), (B,), True), Outcome.KEPT_LOCAL),
        ([REJECTED], None, Outcome.NONE_ACCEPTED),
        ([MISSING], None, Outcome.ALONE),
        ([], None, Outcome.ALONE),
    ],
)
def test_a_round_has_one_outcome(
    verdicts: list[Verdict], harm: Harm | None, outcome: Outcome
) -> None:
    watched = observer()
    watched.committed(Round(1), "m", {}, harm, [asdict(verdict) for verdict in verdicts])
    for one in Outcome:
        assert of(watched, "rounds_total", outcome=one) == (one is outcome)


def test_the_share_of_a_peer_is_that_of_the_last_merge() -> None:
    watched = observer()
    both = [asdict(ACCEPTED), asdict(Verdict(C, True, Reason.OK, weight=0.25))]
    watched.committed(Round(1), "m", {}, None, both)
    assert of(watched, "peer_weight_ratio", peer=B) == 0.5
    assert of(watched, "peer_weight_ratio", peer=C) == 0.25
    harm = Harm(0.5, 0.4, (Attempt((), 9.0), Attempt((B,), 0.4)), (B,), kept_local=False)
    watched.committed(Round(2), "m", {}, harm, both)
    assert of(watched, "peer_weight_ratio", peer=B) == 0, "it was left out again"
    assert of(watched, "peer_weight_ratio", peer=C) == 0.25
    watched.committed(Round(3), "m", {}, None, [asdict(ACCEPTED)])
    assert of(watched, "peer_weight_ratio", peer=C) == 0


def test_rounds_and_phases_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    watched = observer()

    def after(seconds: float, tell: Callable[[], None]) -> None:
        nonlocal now
        now += seconds
        tell()

    def phase(name: str) -> Callable[[], None]:
        return lambda: watched.at(Round(1), name, name)

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


def test_the_duration_of_a_round_begun_in_an_earlier_life_is_not_made_up() -> None:
    watched = observer()
    watched.at(Round(4), "merging", "merging")
    watched.committed(Round(4), "m", {})
    assert of(watched, "round_duration_seconds_count") == 0
    assert of(watched, "rounds_total", outcome="alone") == 1


def test_the_journal_is_not_whole_again_because_it_looks_so_from_inside() -> None:
    watched = observer()
    watched.journal_broken("site-b holds a head that is not here")
    watched.journal_holds()
    assert of(watched, "audit_chain_valid") == 0
    other = observer()
    other.journal_holds()
    assert of(other, "audit_chain_valid") == 1


def test_an_accusation_is_told_and_counted_once_however_many_repeat_it() -> None:
    stream = io.StringIO()
    watched = observer(stream=stream)
    for _ in range(3):
        watched.accused(B, 7)
        watched.accused(C, 7)
    assert of(watched, "accusations_total") == 2
    assert len(stream.getvalue().splitlines()) == 2


def test_whom_our_operator_has_blocked_has_no_streak() -> None:
    watched = observer()
    for number in range(3):
        watched.decided(Round(number), "all", [Verdict(C, False, Reason.BLOCKED)])
    assert of(watched, "peer_consecutive_rejections", peer=C) == 0
    assert of(watched, "peer_verdicts_total", peer=C, verdict="rejected", reason="blocked") == 3


def test_a_reason_that_no_refusal_has_is_counted_as_what_it_is() -> None:
    """A peer that refuses us names the reason, and may name any."""
    watched = observer()
    watched.refused(B, Reason.TOO_FAR, "")
    watched.transfer_failed(B, Reason.OUTLIER, "")
    assert of(watched, "peer_refusals_total", peer=B, reason="malformed") == 1
    failed = {"peer": B, "direction": "received", "reason": "malformed"}
    assert of(watched, "transfer_errors_total", **failed) == 1


def test_a_reason_means_the_same_verdict_everywhere() -> None:
    """In metrics, status and the audit; nobody is rejected for what never arrived."""
    missing = {reason for reason in Reason if fate(False, reason) is Fate.MISSING}
    assert missing == {
        "unreachable", "timeout", "truncated", "stale_round", "unconfirmed", "disk_full"
    }  # fmt: skip
    for reason in Reason:
        watched = observer()
        watched.decided(Round(1), "", [Verdict(C, False, reason)])
        assert watched.status()["peers"][1]["verdict"] == fate(False, reason)


def test_the_documents_table_names_exactly_these_metrics_and_labels() -> None:
    watched = observer()
    watched.trained(Round(1), {"accuracy": 0.9})
    text = generate_latest(watched.metrics.registry).decode()
    there = {}
    for family in text_string_to_metric_families(text):
        labels = {label for sample in family.samples for label in sample.labels}
        name = family.name + ("_total" if family.type == "counter" else "")
        there[name] = labels - {"le"}
    rows = re.findall(r"^\| `lightyear_(\w+)` \|([^|]*)\|", TABLE.read_text(), re.MULTILINE)
    told = {f"lightyear_{name}": set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}
    assert len(rows) == len(told), "none is named twice"
    assert told == there
