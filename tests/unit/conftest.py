"""What tests of several files begin with."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from lightyear_node.transport import limits


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Nothing that strangers send is worth a word in the log."""
    with caplog.at_level(logging.INFO):
        yield caplog
    assert not caplog.records


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch that breaks is tried again soon."""
    monkeypatch.setattr(limits, "FETCH_PAUSE_S", 0.02)
