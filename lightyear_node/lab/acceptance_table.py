"""The acceptance table: the share of each kind of message that is accepted, by task.

Counted over all pairs of sender and judge in the measured rounds, by agreement alone (the paper's
test) and by the guard.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from lightyear_node.lab.results_reader import CLEAN
from lightyear_node.lab.tables import Chapter, Table, TableEntry

Line = Mapping[str, Any]
HONEST = "honest"
COLUMNS = ("message", "judged", "agreement alone", "guard", "guard, by round", "rejected for")
BY_ROUND = ("median agreement, by round", "agreement alone, by round")
"""Columns of measurements that contain the agreement without the guard; older ones do not."""
MISSING = "·"


def chapter(lines: Sequence[Line]) -> Chapter | None:
    """None if nothing was measured."""
    by_task: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        by_task[task_and_rule(line)].append(line)
    if not by_task:
        return None
    return Chapter(
        "Which messages are accepted",
        "Every update of honest sites, and a corrupted copy of it of each kind, judged by every"
        " other site; percent accepted.  Nothing corrupted is merged here.",
        [_table(task, found) for task, found in sorted(by_task.items())],
    )


def task_and_rule(line: Line) -> str:
    """The task, and the rule's label if it is not the default one."""
    return ", ".join(str(line[key]) for key in ("task", "rule") if key in line)


def _table(task: str, lines: Sequence[Line]) -> Table:
    kinds: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        kinds[str(line["malfunction"])].append(line)
    rounds = sorted({int(line["round"]) for line in lines})
    seeds = sorted({line["seed"] for line in lines})
    more = BY_ROUND if any("agreement" in line for line in lines) else ()
    return Table(
        f"{task}: messages accepted",
        (*COLUMNS[:3], *more, *COLUMNS[3:]),
        [_line(kind, kinds[kind], rounds) for kind in sorted(kinds, key=lambda k: (k != CLEAN, k))],
        notes=[
            f"Rounds {', '.join(map(str, rounds))}; seed{'s' * (len(seeds) > 1)}"
            f" {', '.join(map(str, seeds))}."
        ],
    )


def _line(kind: str, found: Sequence[Line], rounds: Sequence[int]) -> list[TableEntry]:
    reasons = Counter(str(line["reason"]) for line in found if not line["guard"])
    by_round = [[line for line in found if line["round"] == number] for number in rounds]
    return [
        TableEntry(HONEST if kind == CLEAN else kind),
        TableEntry(str(len(found))),
        TableEntry(_percent(found, "paper")),
        *(_agreement_by_round(by_round) if any("agreement" in line for line in found) else ()),
        TableEntry(_percent(found, "guard"), bold=True),
        TableEntry(_percents(by_round, "guard")),
        TableEntry(", ".join(f"{reason} {count}" for reason, count in reasons.most_common())),
    ]


def _agreement_by_round(by_round: Sequence[Sequence[Line]]) -> list[TableEntry]:
    known = [[one["agreement"] for one in lines if one.get("agreement") is not None]
             for lines in by_round]  # fmt: skip
    medians = " ".join(f"{median(values):.2f}" if values else MISSING for values in known)
    return [TableEntry(medians), TableEntry(_percents(by_round, "paper"))]


def _percents(by_round: Sequence[Sequence[Line]], judge: str) -> str:
    return " ".join(_percent(lines, judge) if lines else MISSING for lines in by_round)


def _percent(lines: Sequence[Line], judge: str) -> str:
    """Percent accepted; rounded to 0 or 100 only if it is exactly that."""
    accepted, judged = sum(bool(line[judge]) for line in lines), len(lines)
    share = 100 * accepted / judged
    if 0 < accepted < judged:
        share = min(max(share, 0.1), 99.9)
    return f"{share:.1f}".removesuffix(".0")
