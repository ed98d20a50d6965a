"""A node that is bothered by one of its peers, while others behave: is it well?"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asking import DEADLINE_S, A, C, metrics_of

from lightyear_node.lab.federation import Federation, SiteHome

MEMORY_GROWTH_MAX = 96 << 20
"""Of a daemon that has hardly begun: half of it comes with its own first rounds."""


@dataclass
class Scene:
    """Site-a is bothered by site-b, which is not running, and sees an honest site-c."""

    federation: Federation
    node: SiteHome
    bothering: SiteHome
    resting_bytes: int = 0

    def __post_init__(self) -> None:
        self.resting_bytes = self.memory("VmRSS")

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
        """The sum over all labels that are not given."""
        wanted = [f'{key}="{value}"' for key, value in labels.items() if value is not None]
        return sum(
            value
            for name, value in metrics_of(self.node).items()
            if name.startswith(f"lightyear_{series}_total{{") and all(w in name for w in wanted)
        )

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Metrics may be a second old."""
        self.federation.wait_until(lambda _: holds(), DEADLINE_S)

    def check_that_life_goes_on(self) -> None:
        """Rounds close with the honest sites, and nothing of the other was ever accepted."""
        reached = self.round() + 2
        self.federation.wait_until(
            lambda s: s[A] is not None and s[A]["round"] >= reached, DEADLINE_S
        )
        verdicts = [v for entry in self.federation.rounds(A) for v in entry["verdicts"]]
        assert not [v for v in verdicts if v["peer"] == self.bothering.name and v["accepted"]]
        assert [v for v in verdicts if v["peer"] == C and v["accepted"]]
        with urllib.request.urlopen(f"http://{self.node.http_address}/readyz") as answer:
            assert answer.status == 200
        for home in self.federation.homes.values():
            assert "Traceback" not in home.log.read_text()
        assert self.memory("VmHWM") - self.resting_bytes < MEMORY_GROWTH_MAX
