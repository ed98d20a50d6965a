"""The tensor world: pure functions on networks and their weights.

Owns what the paper computes (the agreement score, the selection, the merge), the guard around it,
the weights file, and the malfunctions it is tried against.  Knows nothing of peers' addresses,
rounds in progress, processes or the network; only `weights` touches a disk.
"""

from lightyear_node.learning.agreement import Reference, ntk_agreement, small_sample_floor
from lightyear_node.learning.heads import Head, Kind, find_head
from lightyear_node.learning.malfunctions import Malfunction, corrupt
from lightyear_node.learning.probe import Measured, Probe
from lightyear_node.learning.rules import Candidate, Rule, Share, make_rule, shares_of
from lightyear_node.learning.selection import Selection, exchanged, select
from lightyear_node.learning.weights import (
    Layout,
    SchemaMismatch,
    Weights,
    header_bytes,
    load_into,
    rounded,
    write,
)

__all__ = [
    "Candidate",
    "Head",
    "Kind",
    "Layout",
    "Malfunction",
    "Measured",
    "Probe",
    "Reference",
    "Rule",
    "SchemaMismatch",
    "Selection",
    "Share",
    "Weights",
    "corrupt",
    "exchanged",
    "find_head",
    "header_bytes",
    "load_into",
    "make_rule",
    "ntk_agreement",
    "rounded",
    "select",
    "shares_of",
    "small_sample_floor",
    "write",
]
