"""The fuzz targets accept their seeds, and seeds with small changes, without a violation.

Without atheris, which is not available everywhere; `make fuzz` uses it.
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


def test_the_runner_lists_every_target() -> None:
    assert sorted(load("run").TARGETS) == TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_seeds_and_changed_seeds_violate_no_invariant(target: str) -> None:
    module, rng = load(target), random.Random(7)
    for seed in module.seeds():
        module.check(seed)
        for _ in range(DAMAGED):
            damaged = bytearray(seed[: rng.randrange(len(seed) + 1)])
            if damaged:
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            module.check(bytes(damaged))
