"""Polling for conditions on real machines and containers."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 300.0


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:.0f} s: {what}"
        time.sleep(1)
