"""`lightyear_node.simulate`: flat records, equal to what the command computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightyear_node import LightyearError, simulate

pytest.importorskip("sklearn")

SMALL: dict[str, Any] = {
    "arguments": {"epochs": 1, "batch_size": 64}, "sites": 3, "rounds": 2, "rule": "fedavg",
}  # fmt: skip


def test_there_is_a_record_for_every_site_and_round_and_for_every_verdict() -> None:
    steps: list[tuple[int, int]] = []
    records = simulate(**SMALL, progress=lambda done, total: steps.append((done, total)))
    rounds = [record for record in records if record["kind"] == "round"]
    verdicts = [record for record in records if record["kind"] == "verdict"]
    assert len(rounds) == 3 * 2
    assert len(verdicts) == 3 * 2 * 2
    assert steps[-1] == (6, 6)
    assert all(
        isinstance(value, str | int | float | None) for one in records for value in one.values()
    )
    assert sum(one["site_malfunctions"] for one in rounds) == 2
    assert sum(one["peer_malfunctions"] for one in verdicts) == 4
    assert {one["accepted"] for one in rounds} == {2}
    assert all(0 <= one["merged.accuracy"] <= 1 and one["local.loss"] > 0 for one in rounds)
    assert all(one["weight"] > 0 and one["reason"] == "ok" for one in verdicts)


def test_a_task_that_the_caller_can_import_is_found_by_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_task.py").write_text(
        "from lightyear_node import load_task\n\n\n"
        "def build(site_index: int, site_count: int, seed: int):\n"
        "    context = dict(site_index=site_index, site_count=site_count, seed=seed)\n"
        "    return load_task('lightyear_node.lab.tasks.digits:build', {'epochs': 1}, context)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    records = simulate("own_task:build", sites=2, rounds=1, malfunction="none")
    assert not any(record["site_malfunctions"] for record in records)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rule": "krumm"}, "no rule `krumm`"),
        ({"task": "digit"}, "no built-in task `digit`"),
        ({"bad": 3}, "3 of 3 sites"),
        ({"options": {"slack": 1}}, "slack"),
        ({"arguments": {"speed": 1}}, "no argument `speed`"),
    ],
)
def test_a_wrong_argument_raises_our_error(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(LightyearError, match=message):
        simulate(**{**SMALL, **wrong})
