"""The golden scenarios still produce the transcripts in `golden/`.

After an intended change, `SIM_GOLDEN=write pytest tests/sim/test_golden.py` rewrites them;
read the diff before you commit it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.sim.golden_scenarios import SCENARIOS, GoldenScenario
from tests.sim.transcript import transcript

GOLDEN = Path(__file__).with_name("golden")
WRITE = os.environ.get("SIM_GOLDEN") == "write"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_transcript_is_unchanged(scenario: GoldenScenario) -> None:
    world = scenario()
    assert scenario.__doc__ is not None
    text = f"{scenario.__doc__.strip()}\n\n{transcript(world.history, brief=True)}\n"
    path = GOLDEN / f"{scenario.__name__}.txt"
    if WRITE:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_every_transcript_belongs_to_a_scenario() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == {scenario.__name__ for scenario in SCENARIOS}
