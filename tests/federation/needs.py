"""Tests that need more than Python: skipped where it is missing, except where nothing may be."""

from __future__ import annotations

import os

import pytest


def need(missing: str | None) -> None:
    """Skip the test with the reason, if there is one.  In .ci/run, which sets CI, it fails."""
    if missing is None:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"everything must be tested here, but {missing}")
    pytest.skip(missing)
