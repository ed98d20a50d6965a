from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from staged import MakeResults, staged_results


@pytest.fixture
def make_results(tmp_path: Path) -> MakeResults:
    """Makes up a finished demonstration whose report belongs into a temporary folder."""
    return functools.partial(staged_results, tmp_path)
