"""Prints the metrics of a node after one event of every kind, for `promtool check metrics`."""

import sys
from pathlib import Path

from prometheus_client import generate_latest

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.observer_events import observer, send_all_events

watched = observer()
send_all_events(watched, accuracy=0.9)
print(generate_latest(watched.metrics.registry).decode(), end="")
