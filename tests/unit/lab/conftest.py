from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.support.staged_demo import MakeResults, staged_results


@pytest.fixture
def make_results(tmp_path: Path) -> MakeResults:
    """Invents the results of a demo whose report is in a temporary folder."""
    return functools.partial(staged_results, tmp_path)
