"""The numbers of the paper, shown beside ours.

From its supplementary tables: mean and standard deviation over all clients, in percent.  A number
is returned only for the paper's own setting: its rule, number of clients and strength of noise.
Data and networks differ nevertheless (subsets, similar collections, smaller networks), so the
numbers are not comparable one to one.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

from lightyear_node.lab.results_reader import LIGHTYEAR, RULE_NAMES, FaultSetting, JobRow

SETS = {
    "femnist": "FEMNIST",
    "pcam": "Camelyon17",
    "isic": "Isic19",
    "hc18": "Ultrasound",
    "cxr_lungs": "XRay",
}
NOISE_SCALES = {"Camelyon17": 1.5}
NOISE_SCALE_ELSEWHERE = 120.5
"""Also the default scale of the malfunction."""

CAVEAT = (
    "The paper's numbers are over all clients, on its own data and networks. Here the sets are"
    " subsets or other collections of the same kind and most networks are smaller, so the two are"
    " not comparable one to one: compare the order of the rules and where they break down."
)


def number(row: JobRow) -> tuple[float, float] | None:
    """The paper's mean and standard deviation, if it has this case."""
    name = SETS.get(row.setting.task)
    if name is None or not _paper_rule(row) or not _paper_strength(name, row.fault):
        return None
    by_rule = _tables()["tables"][name].get(row.fault.kind, {})
    columns = by_rule.get(RULE_NAMES.get(row.rule, ""), [])
    # The number of clients must match: four of eight differs from four of five.
    if row.setting.clients != len(columns) + 1 or not 1 <= row.bad <= len(columns):
        return None
    mean, std = columns[row.bad - 1]
    return mean, std


def source() -> str:
    return str(_tables()["source"])


def _paper_rule(row: JobRow) -> bool:
    if row.terms.get("shadow"):
        return False
    if row.rule != LIGHTYEAR:
        return True
    terms = row.terms
    return (
        not terms.get("guard", True)
        and "harm_max" not in terms
        and terms.get("tau", 0.6) == 0.6
        and terms.get("gamma", 0.95) == 0.95
    )


def _paper_strength(name: str, fault: FaultSetting) -> bool:
    if fault.kind in ("ana", "dynamic"):
        used = NOISE_SCALE_ELSEWHERE if fault.scale is None else fault.scale
        return used == NOISE_SCALES.get(name, NOISE_SCALE_ELSEWHERE)
    return fault.scale in (None, 1.0)


@functools.cache
def _tables() -> Any:
    return json.loads(resources.files(__package__).joinpath("paper_tables.json").read_text("utf-8"))
