"""Pictures of judging: how far honest and malfunctioning updates lie apart, and who gets in.

Each function takes what it draws and returns a figure; none reads or writes a file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightyear_node.lab.ink import LIGHT, VERMILION, Paper, blank, quiet
from lightyear_node.lab.rows import CLEAN, NO_FAULT, Experiment, Fault, number_or_none
from lightyear_node.lab.summary import Section, counts
from lightyear_node.lab.tables import accepted_share, rejected_share

DOTS_MAX = 240
"""Of one kind; more would only be blacker.  The box is drawn from all."""
TAU = 0.6


@dataclass(slots=True)
class Measured:
    """A task's values by kind of sender; "none" is honest."""

    agreement: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    distance: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """The guard's distance as a multiple of what it allows."""
    tau: float = TAU
    loops: bool = False
    """From whole runs, where what was accepted changed what came next."""


def measured(experiment: Experiment) -> dict[str, Measured]:
    """By task; verdicts on copies of the same updates where they are there, else those of runs."""
    found: dict[str, Measured] = defaultdict(Measured)
    for line in experiment.acceptance:
        task, kind = found[str(line["task"])], str(line["malfunction"])
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


def agreement_plot(tasks: Mapping[str, Measured], paper: Paper = LIGHT) -> Any:
    """A line of panels for each task: the agreement with τ, the distance with its limit."""
    from matplotlib.ticker import FuncFormatter

    columns = 2 if any(task.distance for task in tasks.values()) else 1
    kinds = max(len({*one.agreement, *one.distance}) for one in tasks.values())
    figure = blank(6.6 * columns, (0.9 + 0.42 * kinds) * len(tasks) + 0.3, paper)
    panels = figure.subplots(len(tasks), columns, squeeze=False)
    for line, (name, task) in zip(panels, tasks.items(), strict=True):
        _spread(line[0], task.agreement, task.tau, "above τ", paper, above=True)
        line[0].set_xlabel("agreement; the dashed line is τ")
        quiet(line[0], name, paper, grid="x")
        if columns == 2:
            _spread(line[1], task.distance, 1.0, "within", paper, above=False)
            line[1].set_xscale("log")
            line[1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            line[1].minorticks_off()
            line[1].set_xlabel("weight distance / the guard's limit; the dashed line is the limit")
            quiet(line[1], "", paper, grid="x")
            line[1].set_visible(bool(task.distance))
    return figure


def _spread(
    axes: Any,
    values: Mapping[str, Sequence[float]],
    limit: float,
    passes: str,
    paper: Paper,
    *,
    above: bool,
) -> None:
    kinds = sorted(values, key=lambda kind: Fault(kind).order)
    for place, kind in enumerate(kinds):
        colour = paper.together if kind == CLEAN else VERMILION
        ordered = sorted(values[kind])
        dots = ordered[:: max(1, len(ordered) // DOTS_MAX)]
        # The golden ratio spreads the dots evenly, and the same way every time.
        height = [place + 0.56 * ((index * 0.618034) % 1 - 0.5) for index in range(len(dots))]
        axes.scatter(dots, height, s=5, color=colour, alpha=0.35, linewidths=0, rasterized=True)
        _box(axes, ordered, place, paper)
        share = sum((v >= limit) if above else (v <= limit) for v in ordered) / len(ordered)
        axes.annotate(
            f"{100 * share:.0f} % {passes}, n = {len(ordered)}", (1, place), (6, 0),
            xycoords=("axes fraction", "data"), textcoords="offset points", va="center",
            fontsize=8.5, color=paper.faint, annotation_clip=False,
        )  # fmt: skip
    axes.axvline(limit, color=paper.ink, linewidth=1.2, linestyle=(0, (5, 3)), zorder=4)
    axes.set_yticks(
        range(len(kinds)), ["honest" if k == CLEAN else Fault(k).words for k in kinds]
    )  # fmt: skip
    axes.set_ylim(len(kinds) - 0.4, -0.6)


def _box(axes: Any, ordered: Sequence[float], place: int, paper: Paper) -> None:
    import numpy as np
    from matplotlib.patches import Rectangle

    low, first, middle, third, high = np.percentile(ordered, (5, 25, 50, 75, 95))
    axes.plot([low, high], [place, place], color=paper.ink, linewidth=1)
    axes.add_patch(
        Rectangle(
            (first, place - 0.22),
            third - first,
            0.44,
            facecolor=paper.ground,
            edgecolor=paper.ink,
            linewidth=1,
            alpha=0.8,
            zorder=3,
        )
    )
    axes.plot([middle, middle], [place - 0.22, place + 0.22], color=paper.ink, lw=2, zorder=4)


def heat_map(section: Section, paper: Paper = LIGHT) -> Any:
    """Which rule lets which malfunction in, and what that costs honest sites.  Dark is bad."""
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("share", [paper.ground, VERMILION])
    labels = judging_labels(section)
    columns = [NO_FAULT, *section.faults]
    figure = blank(3.4 + 1.15 * (2 * len(columns) - 1), 1.7 + 0.36 * len(labels), paper)
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
                axes.add_patch(_tile(column, line, paper.grid if share is None else shades(share)))
                axes.text(
                    column, line, "·" if share is None else f"{100 * share:.0f} %",
                    ha="center", va="center", fontsize=9.5, color=paper.ink,
                )  # fmt: skip
        axes.set_xlim(-0.5, len(faults) - 0.5)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_xticks(range(len(faults)), [_stacked(fault) for fault in faults])
        axes.set_yticks(range(len(labels)), labels)
        quiet(axes, what, paper)
        axes.grid(visible=False)
    return figure


def judging_labels(section: Section) -> list[str]:
    """Rules with any verdict to show; the others judge nobody."""
    return [
        label
        for label in section.labels
        if any(row.verdicts for row in section.rows if row.label == label)
    ]


def _tile(column: int, line: int, colour: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.48, line - 0.46), 0.96, 0.92, facecolor=colour, linewidth=0)


def _stacked(fault: Fault) -> str:
    """Neighbours' names must not run into each other."""
    return fault.words.replace(", scale", "\ns =").replace(" (", "\n(").replace("no m", "no\nm")
