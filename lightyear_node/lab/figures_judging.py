"""Figures of judging: agreement and distance of updates, and the share that is accepted.

Each function takes data and returns a figure; none reads or writes a file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightyear_node.lab.acceptance_table import task_and_rule
from lightyear_node.lab.plot_style import LIGHT, VERMILION, PlotTheme, finish_axes, new_figure
from lightyear_node.lab.results_reader import (
    CLEAN,
    NO_FAULT,
    Experiment,
    FaultSetting,
    number_or_none,
)
from lightyear_node.lab.summary import Section, counts
from lightyear_node.lab.tables import accepted_share, rejected_share

DOTS_MAX = 240
"""Maximum number of dots per kind.  The box is drawn from all values."""
TAU = 0.6


@dataclass(slots=True)
class JudgedValues:
    """A task's values by malfunction of the sender; "none" is honest."""

    agreement: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    distance: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """The guard's distance divided by its limit."""
    tau: float = TAU
    loops: bool = False
    """From whole runs, in which accepted updates influence later ones."""


def measured(experiment: Experiment) -> dict[str, JudgedValues]:
    """Values by task: from acceptance measurements if there are any, else from runs."""
    found: dict[str, JudgedValues] = defaultdict(JudgedValues)
    for line in experiment.acceptance:
        task, kind = found[task_and_rule(line)], str(line["malfunction"])
        checks = line.get("checks") or {}
        task.tau = number_or_none(checks.get("tau")) or task.tau
        agreement = number_or_none(checks.get("agreement"))
        if agreement is not None:
            task.agreement[kind].append(agreement)
        distance, limit = (number_or_none(checks.get(k)) for k in ("distance", "distance_max"))
        if distance is not None and limit:
            task.distance[kind].append(distance / limit)
    for row in experiment.rows:
        name = row.setting.task
        if row.scores and (name not in found or found[name].loops):
            task = found[name]
            task.loops = True
            task.tau = number_or_none(row.terms.get("tau")) or task.tau
            task.agreement[CLEAN] += row.scores.get("honest", [])
            if row.scores.get("malfunctioning"):
                task.agreement[row.fault.kind] += row.scores["malfunctioning"]
    return {name: one for name, one in sorted(found.items()) if one.agreement or one.distance}


def agreement_plot(tasks: Mapping[str, JudgedValues], theme: PlotTheme = LIGHT) -> Any:
    """A row of panels for each task: the agreement with τ, the distance with its limit."""
    from matplotlib.ticker import FuncFormatter

    columns = 2 if any(task.distance for task in tasks.values()) else 1
    kinds = max(len({*one.agreement, *one.distance}) for one in tasks.values())
    figure = new_figure(6.6 * columns, (0.9 + 0.42 * kinds) * len(tasks) + 0.3, theme)
    panels = figure.subplots(len(tasks), columns, squeeze=False)
    for line, (name, task) in zip(panels, tasks.items(), strict=True):
        _spread(line[0], task.agreement, task.tau, "above τ", theme, above=True)
        line[0].set_xlabel("agreement; the dashed line is τ")
        finish_axes(line[0], name, theme, grid="x")
        if columns == 2:
            _spread(line[1], task.distance, 1.0, "within", theme, above=False)
            line[1].set_xscale("log")
            line[1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            line[1].minorticks_off()
            line[1].set_xlabel("weight distance / the guard's limit; the dashed line is the limit")
            finish_axes(line[1], "", theme, grid="x")
            line[1].set_visible(bool(task.distance))
    return figure


def _spread(
    axes: Any,
    values: Mapping[str, Sequence[float]],
    limit: float,
    passes: str,
    theme: PlotTheme,
    *,
    above: bool,
) -> None:
    kinds = sorted(values, key=lambda kind: FaultSetting(kind).order)
    for place, kind in enumerate(kinds):
        colour = theme.highlight if kind == CLEAN else VERMILION
        ordered = sorted(values[kind])
        dots = ordered[:: max(1, len(ordered) // DOTS_MAX)]
        # The golden ratio spreads the dots evenly and reproducibly.
        height = [place + 0.56 * ((index * 0.618034) % 1 - 0.5) for index in range(len(dots))]
        axes.scatter(dots, height, s=5, color=colour, alpha=0.35, linewidths=0, rasterized=True)
        _box(axes, ordered, place, theme)
        share = sum((v >= limit) if above else (v <= limit) for v in ordered) / len(ordered)
        axes.annotate(
            f"{100 * share:.0f} % {passes}, n = {len(ordered)}", (1, place), (6, 0),
            xycoords=("axes fraction", "data"), textcoords="offset points", va="center",
            fontsize=8.5, color=theme.faint, annotation_clip=False,
        )  # fmt: skip
    axes.axvline(limit, color=theme.ink, linewidth=1.2, linestyle=(0, (5, 3)), zorder=4)
    axes.set_yticks(
        range(len(kinds)), ["honest" if k == CLEAN else FaultSetting(k).text for k in kinds]
    )  # fmt: skip
    axes.set_ylim(len(kinds) - 0.4, -0.6)


def _box(axes: Any, ordered: Sequence[float], place: int, theme: PlotTheme) -> None:
    import numpy as np
    from matplotlib.patches import Rectangle

    low, first, middle, third, high = np.percentile(ordered, (5, 25, 50, 75, 95))
    axes.plot([low, high], [place, place], color=theme.ink, linewidth=1)
    axes.add_patch(
        Rectangle(
            (first, place - 0.22),
            third - first,
            0.44,
            facecolor=theme.ground,
            edgecolor=theme.ink,
            linewidth=1,
            alpha=0.8,
            zorder=3,
        )
    )
    axes.plot([middle, middle], [place - 0.22, place + 0.22], color=theme.ink, lw=2, zorder=4)


def heat_map(section: Section, theme: PlotTheme = LIGHT) -> Any:
    """Shares of malfunctioning updates accepted and honest ones rejected.  Dark is bad."""
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("share", [theme.ground, VERMILION])
    labels = judging_labels(section)
    columns = [NO_FAULT, *section.faults]
    figure = new_figure(3.4 + 1.15 * (2 * len(columns) - 1), 1.7 + 0.36 * len(labels), theme)
    panels = figure.subplots(
        1, 2, squeeze=False, width_ratios=(len(columns) - 1, len(columns)), sharey=True
    )[0]
    for axes, faults, measure, what in (
        (panels[0], columns[1:], accepted_share, "malfunctioning accepted"),
        (panels[1], columns, rejected_share, "honest rejected"),
    ):
        for line, label in enumerate(labels):
            for column, fault in enumerate(faults):
                share = measure(
                    counts(row for row in section.rows if (row.label, row.fault) == (label, fault))
                )
                axes.add_patch(_tile(column, line, theme.grid if share is None else shades(share)))
                axes.text(
                    column, line, "·" if share is None else f"{100 * share:.0f} %",
                    ha="center", va="center", fontsize=9.5, color=theme.ink,
                )  # fmt: skip
        axes.set_xlim(-0.5, len(faults) - 0.5)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_xticks(range(len(faults)), [_stacked(fault) for fault in faults])
        axes.set_yticks(range(len(labels)), labels)
        finish_axes(axes, what, theme)
        axes.grid(visible=False)
    return figure


def judging_labels(section: Section) -> list[str]:
    """Labels of the rules that have verdicts."""
    return [
        label
        for label in section.labels
        if any(row.verdicts for row in section.rows if row.label == label)
    ]


def _tile(column: int, line: int, colour: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.48, line - 0.46), 0.96, 0.92, facecolor=colour, linewidth=0)


def _stacked(fault: FaultSetting) -> str:
    """Break a name into lines, so that neighbouring ones do not overlap."""
    return fault.text.replace(", scale", "\ns =").replace(" (", "\n(").replace("no m", "no\nm")
