"""The prepared data sets, and tasks built on them; without them the tests are skipped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightyear_node.lab.tasks import BUILT_IN, DATA_VARIABLE
from lightyear_node.worker.task import Task, load_task
from tests.support.paths import ROOT

DEFAULT_DATA_FOLDER = ROOT / ".." / "shared" / "data"


@pytest.fixture(autouse=True)
def _fixed_seed_and_threads() -> Iterator[None]:
    """One thread, and the same random state for every test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def data() -> str:
    folder = Path(os.environ.get(DATA_VARIABLE) or DEFAULT_DATA_FOLDER)
    if folder.is_dir():
        return str(folder)
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI needs the prepared data sets: set {DATA_VARIABLE}")
    pytest.skip(f"no prepared data sets: {DATA_VARIABLE} is not set, nor is ../shared/data there")


Built = Callable[..., Task]


@pytest.fixture(scope="session")
def built(data: str) -> Built:
    """Builds a built-in task for one client, as the worker does."""

    def build(name: str, client: int = 0, **arguments: Any) -> Task:
        entry = BUILT_IN[name]
        context = {"site_index": client, "site_count": entry.clients, "seed": 3, "site_name": "a"}
        return load_task(entry.entry, {"data": data, **arguments}, context)

    return build


@pytest.fixture(scope="session")
def stored(data: str) -> Callable[[str], dict[str, np.ndarray]]:
    """Reads a file of the data directory with numpy only."""

    def load(relative: str) -> dict[str, np.ndarray]:
        with np.load(Path(data, relative)) as arrays:
            return dict(arrays)

    return load
