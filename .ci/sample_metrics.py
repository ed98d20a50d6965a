"""Prints the metrics of a node that has not started, for `promtool check metrics`."""

from prometheus_client import generate_latest

from lightyear_node.barrier import Phase
from lightyear_node.observe.metrics import Metrics
from lightyear_node.records import PeerName

metrics = Metrics([PeerName("site-b"), PeerName("site-c")], list(Phase), "0", 20)
print(generate_latest(metrics.registry).decode(), end="")
