"""The stories in `golden/` are what still happens.

After a change that is meant, `SIM_GOLDEN=write pytest tests/sim/test_golden.py` writes them anew;
read the difference before you commit it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.sim.scenes import SCENES, Scene
from tests.sim.story import tell

GOLDEN = Path(__file__).with_name("golden")
WRITE = os.environ.get("SIM_GOLDEN") == "write"


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_the_story_is_as_it_was(scene: Scene) -> None:
    world = scene()
    assert scene.__doc__ is not None
    story = f"{scene.__doc__.strip()}\n\n{tell(world.history, brief=True)}\n"
    path = GOLDEN / f"{scene.__name__}.txt"
    if WRITE:
        path.parent.mkdir(exist_ok=True)
        path.write_text(story)
    assert story == path.read_text()


def test_every_story_belongs_to_a_scene() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == {scene.__name__ for scene in SCENES}
