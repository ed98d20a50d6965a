"""The results of an experiment for the terminal: mean scores of honest sites, and failures.

The report has all details.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightyear_node.lab.results_reader import ALONE, CLEAN, FaultSetting, JobRow, read

if TYPE_CHECKING:
    from lightyear_node.lab.experiment import ExperimentOutcome

FAILURES_SHOWN = 10


def print_outcome(outcome: ExperimentOutcome, console: Console | None = None) -> None:
    """Print the summary to standard output."""
    console = console or Console()
    if outcome.page is not None:
        by_grid: dict[tuple[str, str, str], list[JobRow]] = defaultdict(list)
        for row in read(outcome.directory).rows:
            by_grid[row.grid, row.setting.task, row.metric].append(row)
        for (grid, task, metric), rows in by_grid.items():
            heading = f"{grid}: {metric} on {task}, mean over honest sites, counts and seeds"
            console.print(Text(heading))
            console.print(_table(rows))
    for job, message in outcome.failures[:FAILURES_SHOWN]:
        console.print(Text(f"failed: {job}: {message}", "red"), soft_wrap=True)
    hidden = len(outcome.failures) - FAILURES_SHOWN
    if hidden > 0:
        console.print(Text(f"… and {hidden} more failed", "red"))
    if outcome.page is not None:
        console.print(Text.assemble("Report: ", (str(outcome.page), "bold")), soft_wrap=True)


def cells(directory: Path) -> list[dict[str, Any]]:
    """The same numbers as records; a mean is None if every model has diverged."""
    found: dict[tuple[str, str, str, FaultSetting, int], list[JobRow]] = defaultdict(list)
    for row in read(directory).rows:
        found[row.grid, row.setting.task, row.label, row.fault, row.bad].append(row)
    return [
        {
            "grid": grid,
            "task": task,
            "label": label,
            "malfunction": fault.name,
            "scale": fault.scale,
            "bad": bad,
            "seeds": sorted({row.seed for row in rows}),
            "mean_honest": _mean(rows),
            "mean_all": _mean(rows, honest=False),
        }
        for (grid, task, label, fault, bad), rows in found.items()
    ]


def _table(rows: list[JobRow]) -> Table:
    faults = sorted({row.fault for row in rows}, key=lambda fault: fault.order)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rule")
    for fault in faults:
        table.add_column(_heading(fault), justify="right")
    labels = dict.fromkeys(
        row.label for row in sorted(rows, key=lambda row: (row.rule != ALONE, row.rule_order))
    )
    for label in labels:
        cells = (
            _mean([row for row in rows if row.label == label and row.fault == fault])
            for fault in faults
        )
        table.add_row(Text(label), *("" if cell is None else f"{cell:.3f}" for cell in cells))
    return table


def _heading(fault: FaultSetting) -> str:
    if fault.kind == CLEAN:
        return "clean"
    return fault.name if fault.scale is None else f"{fault.name} {fault.scale:g}"


def _mean(rows: list[JobRow], *, honest: bool = True) -> float | None:
    """The mean over the sites that have a score."""
    finals = [
        site.final
        for row in rows
        for site in row.sites
        if site.final is not None and not (honest and site.malfunctioning)
    ]
    return fmean(finals) if finals else None
