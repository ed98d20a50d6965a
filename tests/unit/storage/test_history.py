"""The history of completed rounds, built from records."""

from __future__ import annotations

from typing import Any

from lightyear_node.storage.history import History


def decision(**more: Any) -> dict[str, Any]:
    verdicts = [{"peer": "site-b", "reason": "too_far"}, {"peer": "site-c", "reason": "ok"}]
    return {"cause": "all", "why": "all", "verdicts": verdicts, **more}


def completed(body: dict[str, Any]) -> list[dict[str, Any]]:
    history = History()
    history.add("decision", 0, body, 0)
    history.add("commit", 0, {"model": "m", "metrics": {}}, 0)
    [entry] = history.rounds()
    found: list[dict[str, Any]] = entry["verdicts"]
    return found


def test_verdicts_have_the_details_that_stand_beside_them() -> None:
    details = {"tensor": "head.weight"}
    far, good = completed(decision(details={"site-b": details}))
    assert far["details"] == details
    assert "details" not in good


def test_a_decision_without_details_is_read_as_before() -> None:
    assert completed(decision()) == decision()["verdicts"]
