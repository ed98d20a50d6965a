"""Statistics of result rows: means, spreads, paired differences, counts of verdicts.  Pure.

Scores are in percent.  A mean is the mean over seeds of the mean over clients.  The spread over
clients is the population standard deviation within a seed, averaged over seeds; the spread over
seeds is the sample standard deviation of the per-seed means.  A client whose score is not finite
has diverged: it is left out of the mean and counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev, stdev
from typing import Literal

from lightyear_node.lab.malfunctions import ATTACK_SUCCESS
from lightyear_node.lab.results_reader import (
    ALONE,
    NO_FAULT,
    FaultSetting,
    JobRow,
    Setting,
    SiteResultRow,
)

Population = Literal["all", "honest"]
Values = Mapping[int, Sequence[float | None]]
"""By seed, one value per client."""


@dataclass(frozen=True, slots=True)
class Stat:
    mean: float | None
    std_clients: float | None
    """None if no seed has two clients."""
    std_seeds: float | None
    """None with fewer than two seeds."""
    seeds: int
    clients: int
    """Number of client scores, diverged ones included."""
    diverged: int


@dataclass(frozen=True, slots=True)
class Counts:
    """Verdicts on other sites' updates, over all judges and rounds."""

    malfunctioning_accepted: int
    malfunctioning_judged: int
    honest_rejected: int
    honest_judged: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One rule in one case: a row for each seed."""

    label: str
    fault: FaultSetting
    bad: int
    rows: Sequence[JobRow]


@dataclass(frozen=True, slots=True)
class Section:
    """Comparable runs of one grid: the subject of one table."""

    grid: str
    setting: Setting
    metric: str
    rows: Sequence[JobRow]

    @property
    def title(self) -> str:
        return f"{self.setting.task}, {self.grid}"

    @property
    def seeds(self) -> list[int]:
        return sorted({row.seed for row in self.rows})

    @property
    def faults(self) -> list[FaultSetting]:
        found = {row.fault for row in self.rows} - {NO_FAULT}
        return sorted(found, key=lambda fault: fault.order)

    @property
    def labels(self) -> list[str]:
        """Labels of the rules, without local-only training, in the order of the tables."""
        orders = {row.label: row.rule_order for row in self.rows if row.rule != ALONE}
        return sorted(orders, key=lambda label: orders[label])

    def bads(self, fault: FaultSetting) -> list[int]:
        return sorted({row.bad for row in self.rows if row.fault == fault})

    def cells(self) -> dict[tuple[str, FaultSetting, int], Cell]:
        by_place: dict[tuple[str, FaultSetting, int], dict[int, JobRow]] = defaultdict(dict)
        for row in self.rows:
            by_place[row.label, row.fault, row.bad][row.seed] = row
        return {
            place: Cell(*place, [by_seed[seed] for seed in sorted(by_seed)])
            for place, by_seed in by_place.items()
        }


def sections(rows: Sequence[JobRow]) -> list[Section]:
    """Group rows into sections; a grid that has several settings gets one section for each."""
    by_place: dict[tuple[str, Setting, str], list[JobRow]] = defaultdict(list)
    settings: dict[tuple[str, str], set[Setting]] = defaultdict(set)
    for row in rows:
        by_place[row.grid, row.setting, row.metric].append(row)
        settings[row.setting.task, row.grid].add(row.setting)
    found = []
    for (grid, setting, metric), members in by_place.items():
        several = len(settings[setting.task, grid]) > 1
        extra = ""
        if several:
            args = f", {setting.args}" if shown_args(setting) else ""
            extra = f" ({setting.clients} clients, {setting.rounds} rounds{args})"
        found.append(Section(grid + extra, setting, metric, members))
    return sorted(found, key=lambda one: (one.setting.task, one.grid != "main", one.grid))


def shown_args(setting: Setting) -> str:
    return "" if setting.args in (None, "{}") else str(setting.args)


def stat(values: Values) -> Stat:
    finite = {seed: [v for v in all_of if v is not None] for seed, all_of in values.items()}
    counted = [found for found in finite.values() if found]
    means = [fmean(found) for found in counted]
    spreads = [pstdev(found) for found in counted if len(found) > 1]
    total = sum(len(all_of) for all_of in values.values())
    return Stat(
        mean=fmean(means) if means else None,
        std_clients=fmean(spreads) if spreads else None,
        std_seeds=stdev(means) if len(means) > 1 else None,
        seeds=len(values),
        clients=total,
        diverged=total - sum(map(len, counted)),
    )


def scores(rows: Iterable[JobRow], population: Population) -> Values:
    """Final scores in percent."""
    return {
        row.seed: [
            None if site.final is None else 100 * site.final
            for site in row.sites
            if population == "all" or not site.malfunctioning
        ]
        for row in rows
    }


def counts(rows: Iterable[JobRow]) -> Counts:
    natures = {"honest": [0, 0], "malfunctioning": [0, 0]}
    for row in rows:
        for nature, sums in natures.items():
            verdicts = row.verdicts.get(nature, {})
            sums[0] += verdicts.get("ok", 0)
            sums[1] += sum(verdicts.values())
    (honest, honest_judged), (bad, bad_judged) = natures["honest"], natures["malfunctioning"]
    return Counts(bad, bad_judged, honest_judged - honest, honest_judged)


class References:
    """Finds the run that a run is compared with: same setting, same seed."""

    def __init__(self, rows: Iterable[JobRow]) -> None:
        self._alone: dict[tuple[Setting, int], dict[str, JobRow]] = defaultdict(dict)
        self._clean: dict[tuple[Setting, int, str, str], dict[str, JobRow]] = defaultdict(dict)
        for row in rows:
            if row.rule == ALONE:
                self._alone[row.setting, row.seed][row.grid] = row
            elif row.fault == NO_FAULT:
                self._clean[self._place(row)][row.grid] = row

    def alone(self, row: JobRow) -> JobRow | None:
        return self._nearest(self._alone.get((row.setting, row.seed), {}), row)

    def clean(self, row: JobRow) -> JobRow | None:
        """The same rule without malfunction."""
        return self._nearest(self._clean.get(self._place(row), {}), row)

    @staticmethod
    def _place(row: JobRow) -> tuple[Setting, int, str, str]:
        return (row.setting, row.seed, row.rule, repr(sorted(row.terms.items())))

    @staticmethod
    def _nearest(by_grid: Mapping[str, JobRow], row: JobRow) -> JobRow | None:
        if row.grid in by_grid or row.setting.args is None:
            # Without the task's arguments, another grid may have used another network.
            return by_grid.get(row.grid)
        return next((by_grid[name] for name in sorted(by_grid)), None)


def differences(rows: Iterable[JobRow], reference: Callable[[JobRow], JobRow | None]) -> Values:
    """Honest clients' final score minus theirs in the reference run, in percentage points."""
    found: dict[int, list[float | None]] = {}
    for row in rows:
        other = reference(row)
        if other is None:
            continue
        before = {site.name: site.final for site in other.sites}
        found[row.seed] = [
            _minus(site.final, before.get(site.name))
            for site in row.sites
            if not site.malfunctioning
        ]
    return found


@dataclass(frozen=True, slots=True)
class ShadowCell:
    """Honest clients with a shadow in one case: federated and served against training alone.

    Values of the last round in percent, one per client and seed; diverged models are left out.
    """

    label: str
    fault: FaultSetting
    bad: int
    alone: Sequence[float]
    federated: Sequence[float]
    """Minus alone."""
    served: Sequence[float]
    """Minus alone."""
    success_alone: Sequence[float]
    """Of an attack that measures it; otherwise empty."""
    success_served: Sequence[float]


def shadow_cells(section: Section) -> list[ShadowCell]:
    """Cases in which the results hold curves of a shadow."""
    found = []
    for cell in section.cells().values():
        sites = [site for row in cell.rows for site in row.sites if not site.malfunctioning]
        scores = _last_values(sites, section.metric)
        success = _last_values(sites, ATTACK_SUCCESS)
        if scores:
            found.append(
                ShadowCell(
                    *(cell.label, cell.fault, cell.bad),
                    alone=[alone for alone, _, _ in scores],
                    federated=[federated - alone for alone, federated, _ in scores],
                    served=[served - alone for alone, _, served in scores],
                    success_alone=[alone for alone, _, _ in success],
                    success_served=[served for _, _, served in success],
                )
            )
    return sorted(found, key=lambda cell: (cell.label, cell.fault.order, cell.bad))


def _last_values(sites: Iterable[SiteResultRow], metric: str) -> list[tuple[float, float, float]]:
    """Alone, federated and served, in percent, of the sites that have a shadow."""
    found = []
    for site in sites:
        curves = (site.curves.get(f"{kind}.{metric}") for kind in ("alone", "merged", "served"))
        alone, federated, served = (curve[-1] if curve else None for curve in curves)
        if alone is not None and federated is not None and served is not None:
            found.append((100 * alone, 100 * federated, 100 * served))
    return found


def _minus(score: float | None, before: float | None) -> float | None:
    return None if score is None or before is None else 100 * (score - before)


def alone_of(section: Section, references: References) -> list[JobRow]:
    """The local-only runs for a section: its own, or another grid's with the same setting."""
    found = {row.seed: references.alone(row) for row in section.rows}
    return [row for _, row in sorted(found.items()) if row is not None]
