"""The simulator finds every planted bug, by the invariant that it breaks."""

from __future__ import annotations

import time

import pytest

from tests.sim import directed
from tests.sim.planted import BUGS, Bug
from tests.sim.scenario import SeedFailed, run

SEEDS_NEARBY = 40
"""A change of the barrier changes the history of a seed; then one of the next seeds fails."""
SEARCH_S = 120.0


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    if not isinstance(bug.catches, int):
        assert directed.caught(bug.catches) in bug.invariants
        return
    failure = first_failure(bug.catches, SEEDS_NEARBY)
    assert failure is not None
    assert failure.invariant in bug.invariants
    assert f"run.py --seeds {failure.seed} --trace" in str(failure)


@pytest.mark.thorough
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found_by_arbitrary_seeds(
    bug: Bug, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seeds are not selected; a bug that they miss has a directed schedule."""
    bug.plant(monkeypatch)
    failure = first_failure(50_000, 10_000, time.process_time() + SEARCH_S)
    if failure is None:
        assert not isinstance(bug.catches, int), f"not found in {SEARCH_S:.0f} s"
    else:
        assert failure.invariant in bug.invariants


def first_failure(seed: int, seeds: int, until: float = float("inf")) -> SeedFailed | None:
    for one in range(seed, seed + seeds):
        if time.process_time() > until:
            break
        try:
            run(one)
        except SeedFailed as failure:
            return failure
    return None
