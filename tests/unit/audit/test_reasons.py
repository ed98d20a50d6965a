"""Explanations fit the task, and name the tensor that is too far."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightyear_node.audit.reasons import reason_text
from lightyear_node.audit.rounds import RoundEntry, explain_verdict, rounds_of
from lightyear_node.protocol.durable_state import Cause, Decision, DurableState
from lightyear_node.storage.journal_reader import reading
from lightyear_node.types import Generation, Reason, Round, Verdict
from tests.support.journals import IDENTITIES, NAMES, JournalSite

FAR = Verdict(
    NAMES[1],
    False,
    Reason.TOO_FAR,
    checks={"distance": 2.0, "distance_max": 0.5},
    details={"tensor": "head.weight", "loss": "measured"},
)


def recorded(site: JournalSite) -> RoundEntry:
    site.close()
    with reading(site.path) as copy:
        return rounds_of(copy.rows())[0]


@pytest.mark.parametrize("reason", [Reason.AGREEMENT_BELOW_TAU, Reason.TOO_FAR, Reason.LOSS_REGRET])
def test_the_advice_for_a_regression_is_about_targets_and_not_about_labels(reason: Reason) -> None:
    plain, measured = reason_text(reason), reason_text(reason, {"loss": "measured"})
    assert measured.about == plain.about
    for word in ("targets", "learning rate", "preprocessing"):
        assert word in measured.advice
    assert "label" not in measured.advice
    assert reason_text(reason, {"loss": "other"}) == plain


def test_only_a_distance_names_a_tensor() -> None:
    named = {"tensor": "head.weight"}
    assert "`head.weight`" in reason_text(Reason.TOO_FAR, named).about
    assert reason_text(Reason.LOSS_REGRET, named) == reason_text(Reason.LOSS_REGRET)
    assert reason_text(Reason.TOO_FAR, {"tensor": 7}) == reason_text(Reason.TOO_FAR)


def test_explain_reads_the_details_that_stand_beside_the_verdicts(tmp_path: Path) -> None:
    site = JournalSite(tmp_path, IDENTITIES[NAMES[0]])
    site.seal(0)
    decision = Decision(Round(0), Cause.ALL, "all", (), (FAR, replace(FAR, peer=NAMES[2])))
    state = DurableState(Generation(0), Round(0), site.update(0), decision)
    site.round_journal.decide(decision, state, {})
    entry = recorded(site)
    found = explain_verdict(entry, NAMES[1])
    assert found["details"] == FAR.details
    assert "`head.weight`" in found["about"]
    # Earlier versions pass every key of a verdict to a constructor without this one.
    assert all("details" not in verdict for verdict in entry.decided["verdicts"])
    restored = DurableState.from_plain(state.to_plain()).decision
    assert restored is not None
    assert restored.verdicts[0] == replace(FAR, details={})


def test_a_decision_without_details_is_recorded_as_before(tmp_path: Path) -> None:
    site = JournalSite(tmp_path, IDENTITIES[NAMES[0]])
    site.seal(0)
    decision = Decision(Round(0), Cause.ALL, "all", (), (replace(FAR, details={}),))
    site.round_journal.decide(decision, DurableState(Generation(0), Round(0)), {})
    entry = recorded(site)
    assert set(entry.decided) == {"round", "cause", "why", "accepted", "verdicts", "rule_state"}
    assert "one layer" in explain_verdict(entry, NAMES[1])["about"]
