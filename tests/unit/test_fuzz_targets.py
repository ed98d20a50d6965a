"""The fuzz targets keep their promises for what they begin with, and for a little damage to it.

Without atheris, which not every machine has; `make fuzz` goes on from here.
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "fuzz"
TARGETS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "run")
DAMAGED = 30


def load(target: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fuzz_{target}", FOLDER / f"{target}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_target_is_run() -> None:
    assert sorted(load("run").TARGETS) == TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_sound_and_damaged_inputs(target: str) -> None:
    module, chance = load(target), random.Random(7)
    for seed in module.seeds():
        module.check(seed)
        for _ in range(DAMAGED):
            damaged = bytearray(seed[: chance.randrange(len(seed) + 1)])
            if damaged:
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            module.check(bytes(damaged))
