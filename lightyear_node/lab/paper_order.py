"""Compares the order of the rules in our tables with that in the paper's.

Scores on other data and networks are not comparable, but their order is: Spearman's rank
correlation is 1 if both orders are the same, 0 if they are unrelated, −1 if one is reversed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import correlation

from lightyear_node.lab import paper_numbers
from lightyear_node.lab.results_reader import FaultSetting
from lightyear_node.lab.summary import Section, scores, stat

RULES_MIN = 3
"""With two rules the correlation could only be 1 or −1."""
DIVERGED = -1.0
"""Score of a rule with which every client diverged: below all others."""


@dataclass(frozen=True, slots=True)
class OrderComparison:
    """The rules under one malfunction with one number of bad clients."""

    bad: int
    rules: int
    correlation: float | None
    """None if all rules have the same score in one of the tables."""


def compare_order(section: Section, fault: FaultSetting) -> list[OrderComparison]:
    """One comparison for each number of bad clients for which both tables have enough rules."""
    cells, found = section.cells(), []
    for bad in section.bads(fault):
        pairs = []
        for label in section.labels:
            cell = cells.get((label, fault, bad))
            theirs = paper_numbers.number(cell.rows[0]) if cell is not None else None
            if cell is not None and theirs is not None:
                ours = stat(scores(cell.rows, "all")).mean
                pairs.append((DIVERGED if ours is None else ours, theirs[0]))
        if len(pairs) >= RULES_MIN:
            ours_and_theirs = list(zip(*pairs, strict=True))
            found.append(OrderComparison(bad, len(pairs), rank_correlation(*ours_and_theirs)))
    return found


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Spearman's ρ, equal values with their mean rank; None if one side is constant."""
    if len(set(left)) < 2 or len(set(right)) < 2:
        return None
    return correlation(_ranks(left), _ranks(right))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(bisect_left(ordered, one) + bisect_right(ordered, one)) / 2 for one in values]
