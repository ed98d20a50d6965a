"""Fixtures that several unit tests share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from lightyear_node.transport import limits


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Check that the test logs nothing at level INFO or above."""
    with caplog.at_level(logging.INFO):
        yield caplog
    assert not caplog.records


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pause before a failed fetch is retried."""
    monkeypatch.setattr(limits, "FETCH_BACKOFF_S", 0.02)
