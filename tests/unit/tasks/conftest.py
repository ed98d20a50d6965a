"""Where the prepared data sets are; without them these tests say why they do not run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightyear_node.tasks import BUILT_IN, DATA_VARIABLE
from lightyear_node.worker.task import Task, build_task

BESIDE_THE_PROJECT = Path(__file__).parents[3] / ".." / "shared" / "data"


@pytest.fixture(autouse=True)
def _steady() -> Iterator[None]:
    """One thread, and a seed that no other test has moved."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def data() -> str:
    folder = Path(os.environ.get(DATA_VARIABLE) or BESIDE_THE_PROJECT)
    if folder.is_dir():
        return str(folder)
    if os.environ.get("CI") == "true":
        pytest.fail(f"the prepared data sets must be there in CI; name them by {DATA_VARIABLE}")
    pytest.skip(f"no prepared data sets: {DATA_VARIABLE} is not set, nor is ../shared/data there")


Built = Callable[..., Task]


@pytest.fixture(scope="session")
def built(data: str) -> Built:
    """A built-in task of one client, made as the worker makes it."""

    def build(name: str, client: int = 0, **arguments: Any) -> Task:
        entry = BUILT_IN[name]
        context = {"site_index": client, "site_count": entry.clients, "seed": 3, "site_name": "a"}
        return build_task(entry.entry, {"data": data, **arguments}, context)

    return build


@pytest.fixture(scope="session")
def stored(data: str) -> Callable[[str], dict[str, np.ndarray]]:
    """A file of the data directory, read without any code of ours."""

    def load(relative: str) -> dict[str, np.ndarray]:
        with np.load(Path(data, relative)) as arrays:
            return dict(arrays)

    return load
