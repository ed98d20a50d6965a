"""The paper's own numbers, to be shown beside ours.

They are those of its supplementary tables: mean and standard deviation over all clients, in
percent.  A number is given only for the setting that it was measured in: the paper's rule, its
number of clients, its strength of noise.  The data are not the paper's all the same (subsets, other
collections of the same kind, smaller networks), so the numbers are not comparable one to one.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

from lightyear_node.lab.rows import LIGHTYEAR, RULE_NAMES, Fault, Row

SETS = {
    "femnist": "FEMNIST",
    "pcam": "Camelyon17",
    "isic": "Isic19",
    "hc18": "Ultrasound",
    "cxr_lungs": "XRay",
}
NOISE_SCALES = {"Camelyon17": 1.5}
NOISE_SCALE_ELSEWHERE = 120.5
"""Also what a malfunction without a scale means here."""

CAVEAT = (
    "The paper's numbers are over all clients, on its own data and networks. Here the sets are"
    " subsets or other collections of the same kind and most networks are smaller, so the two are"
    " not comparable one to one: compare the order of the rules and where they break down."
)


def number(row: Row) -> tuple[float, float] | None:
    """The paper's mean and standard deviation where it has this very case."""
    name = SETS.get(row.setting.task)
    if name is None or not _paper_rule(row) or not _paper_strength(name, row.fault):
        return None
    by_rule = _tables()["tables"][name].get(row.fault.kind, {})
    columns = by_rule.get(RULE_NAMES.get(row.rule, ""), [])
    # Four of eight is another case than four of five.
    if row.setting.clients != len(columns) + 1 or not 1 <= row.bad <= len(columns):
        return None
    mean, std = columns[row.bad - 1]
    return mean, std


def source() -> str:
    return str(_tables()["source"])


def _paper_rule(row: Row) -> bool:
    if row.rule != LIGHTYEAR:
        return True
    terms = row.terms
    return (
        not terms.get("guard", True)
        and "harm_max" not in terms
        and terms.get("tau", 0.6) == 0.6
        and terms.get("gamma", 0.95) == 0.95
    )


def _paper_strength(name: str, fault: Fault) -> bool:
    if fault.kind in ("ana", "dynamic"):
        used = NOISE_SCALE_ELSEWHERE if fault.scale is None else fault.scale
        return used == NOISE_SCALES.get(name, NOISE_SCALE_ELSEWHERE)
    return fault.scale in (None, 1.0)


@functools.cache
def _tables() -> Any:
    return json.loads(resources.files(__package__).joinpath("paper_tables.json").read_text("utf-8"))
