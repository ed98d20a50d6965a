"""The figure of sites with a shadow: federated and served models against training alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from lightyear_node.lab.plot_style import (
    LIGHT,
    VERMILION,
    PlotTheme,
    finish_axes,
    legend_below,
    new_figure,
)
from lightyear_node.lab.results_reader import FaultSetting
from lightyear_node.lab.summary import Section, ShadowCell, shadow_cells

OFFSET = 0.17
"""Between the two models of one case, in lines."""


def shadow_plot(sections: Sequence[Section], theme: PlotTheme = LIGHT) -> Any:
    """A panel for each section, a line for each malfunction."""
    cells = [shadow_cells(section) for section in sections]
    faults = sorted({cell.fault for one in cells for cell in one}, key=lambda fault: fault.order)
    figure = new_figure(2.2 + 2.1 * len(sections), 1.6 + 0.32 * len(faults), theme)
    panels = figure.subplots(1, len(sections), sharey=True, squeeze=False)[0]
    colours = {"federated": VERMILION, "served": theme.highlight}
    for axes, section, own in zip(panels, sections, cells, strict=True):
        _panel(axes, faults, own, colours)
        axes.axvline(0, color=theme.ink, linewidth=1.0, linestyle=(0, (5, 3)), zorder=1)
        axes.set_xlabel("points")
        finish_axes(axes, section.title.partition(", ")[2], theme, grid="x")
    panels[0].set_yticks(range(len(faults)), [fault.text for fault in faults])
    panels[0].set_ylim(len(faults) - 0.4, -0.6)
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour, marker="o", linewidth=1.2) for colour in colours.values()
    ]
    legend_below(figure, handles, list(colours), theme, columns=2)
    return figure


def _panel(
    axes: Any, faults: Sequence[FaultSetting], cells: Sequence[ShadowCell], colours: dict[str, str]
) -> None:
    """Means as dots; lines reach from the worst to the best client."""
    gains: dict[tuple[str, FaultSetting], list[float]] = defaultdict(list)
    for cell in cells:
        gains["federated", cell.fault] += cell.federated
        gains["served", cell.fault] += cell.served
    for (model, fault), values in gains.items():
        line = faults.index(fault) + (OFFSET if model == "served" else -OFFSET)
        colour = colours[model]
        axes.plot([min(values), max(values)], [line, line], color=colour, linewidth=1.2, zorder=2)
        axes.plot([fmean(values)], [line], color=colour, marker="o", markersize=4.5, zorder=3)
