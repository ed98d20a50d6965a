"""Marks and order of all tests."""

from __future__ import annotations

import signal

import pytest

REAL_NODES = {"federation", "faults", "browser"}
"""Folders of tests with real nodes, which take seconds to start."""


def pytest_configure() -> None:
    """Let Ctrl-C reach the processes that tests start: a shell's background jobs ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of real nodes as slow, and run them first: short ones then fill all cores."""
    for item in items:
        if item.path.parent.name in REAL_NODES and item.get_closest_marker("quick") is None:
            item.add_marker("slow")
        if item.path.parent.name == "sim":
            # Of pytest-cov: measuring doubles their time, and the unit tests cover the protocol.
            item.add_marker("no_cover")
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
