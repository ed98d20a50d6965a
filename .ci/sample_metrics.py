"""Prints the metrics of a node to which everything has happened, for `promtool check metrics`."""

import sys
from pathlib import Path

from prometheus_client import generate_latest

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.unit.happenings import everything_happens, observer

watched = observer()
everything_happens(watched, accuracy=0.9)
print(generate_latest(watched.metrics.registry).decode(), end="")
