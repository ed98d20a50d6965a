"""A node that a misbehaving peer attacks while an honest peer works: is it healthy?"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightyear_node.lab.federation import Federation, SiteHome
from tests.support.site_queries import DEADLINE_S, A, C, metrics_of

MEMORY_GROWTH_MAX = 96 << 20
"""Measured from the daemon's start; its own first rounds take about half of it."""


@dataclass
class AttackedNode:
    """Site-a, which an attacker with site-b's keys calls, beside an honest site-c."""

    federation: Federation
    node: SiteHome
    attacker: SiteHome
    idle_bytes: int = 0

    def __post_init__(self) -> None:
        self.idle_bytes = self.memory("VmRSS")

    def round(self) -> int:
        status = self.federation.status()[A]
        assert status is not None
        return int(status["round"])

    def memory(self, field: str) -> int:
        text = Path(f"/proc/{self.federation.pid(A)}/status").read_text()
        found = re.search(rf"{field}:\s+(\d+) kB", text)
        assert found
        return int(found[1]) * 1024

    def count(self, series: str, **labels: str | None) -> float:
        """Sum a counter over all labels that are not given."""
        wanted = [f'{key}="{value}"' for key, value in labels.items() if value is not None]
        return sum(
            value
            for name, value in metrics_of(self.node).items()
            if name.startswith(f"lightyear_{series}_total{{") and all(w in name for w in wanted)
        )

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait for a condition on metrics, which may be a second old."""
        self.federation.wait_until(lambda _: holds(), DEADLINE_S)

    def check_progress(self) -> None:
        """Check that rounds close with the honest site and without the attacker's updates."""
        reached = self.round() + 2
        self.federation.wait_until(
            lambda s: (status := s[A]) is not None and status["round"] >= reached, DEADLINE_S
        )
        verdicts = [v for entry in self.federation.rounds(A) for v in entry["verdicts"]]
        assert not [v for v in verdicts if v["peer"] == self.attacker.name and v["accepted"]]
        assert [v for v in verdicts if v["peer"] == C and v["accepted"]]
        with urllib.request.urlopen(f"http://{self.node.http_address}/readyz") as answer:
            assert answer.status == 200
        for home in self.federation.homes.values():
            assert "Traceback" not in home.log.read_text()
        assert self.memory("VmHWM") - self.idle_bytes < MEMORY_GROWTH_MAX
