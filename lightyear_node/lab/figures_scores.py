"""Figures of final scores: by malfunction, number of bad clients, γ and strength of noise.

Each function takes data and returns a figure; none reads or writes a file.  Scores are in percent
and over all clients, as in the paper.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightyear_node.lab.plot_style import (
    GREEN,
    GREY,
    LIGHT,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    PlotTheme,
    finish_axes,
    legend_below,
    new_figure,
)
from lightyear_node.lab.results_reader import (
    LIGHTYEAR,
    NO_FAULT,
    RULE_NAMES,
    FaultSetting,
    JobRow,
    differing,
)
from lightyear_node.lab.summary import (
    References,
    Section,
    alone_of,
    counts,
    scores,
    stat,
)
from lightyear_node.lab.tables import accepted_share

LEGEND_COLUMNS = 5
OTHERS = (ORANGE, GREEN, PURPLE, SKY, YELLOW, GREY)
MARKERS = "os^vDPX<>"
FAULT_COLOURS = (SKY, ORANGE, GREEN, PURPLE, YELLOW, GREY, VERMILION)
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "oooo", "++++", "----")
"""One more than colours, so that pairs of colour and hatch repeat late."""


@dataclass(frozen=True, slots=True)
class Style:
    colour: str
    width: float
    marker: str
    dashes: Any
    above: int

    def kwargs(self) -> dict[str, Any]:
        return {
            "color": self.colour, "linewidth": self.width, "marker": self.marker,
            "linestyle": self.dashes, "zorder": self.above, "markersize": 3 + self.width,
        }  # fmt: skip


def styles(rows: Sequence[JobRow], theme: PlotTheme) -> dict[str, Style]:
    """LIGHTYEAR's lines are thick; the others differ by colour and marker."""
    orders = {row.label: (row.rule_order, row.prominent) for row in rows}
    ordered = sorted(orders, key=lambda label: orders[label][0])
    ours = [label for label in ordered if orders[label][1]]
    others = [label for label in ordered if not orders[label][1]]
    found = {}
    for place, label in enumerate(reversed(ours)):
        colour = (theme.highlight, VERMILION, GREEN, PURPLE)[place % 4]
        found[label] = Style(colour, 2.8, "oDs^"[place % 4], "-", 5)
    for place, label in enumerate(others):
        dashes = ("-", (0, (4, 1.5)))[place // len(OTHERS) % 2]
        marker = MARKERS[place % len(MARKERS)]
        found[label] = Style(OTHERS[place % len(OTHERS)], 1.1, marker, dashes, 3)
    return {label: found[label] for label in (*others, *ours)}


def box_plot(sections: Sequence[Section], references: References, theme: PlotTheme = LIGHT) -> Any:
    """A panel for each section; for each rule a box for each malfunction."""
    faults = sorted({f for one in sections for f in one.faults}, key=lambda fault: fault.order)
    groups = max(len(one.labels) for one in sections)
    width = max(8.0, 1.4 + groups * max(0.95, 0.24 * len(faults)))
    figure = new_figure(width, 0.8 + 3.1 * len(sections), theme)
    panels = figure.subplots(len(sections), 1, squeeze=False)[:, 0]
    for axes, section in zip(panels, sections, strict=True):
        _boxes(axes, section, faults, theme)
        alone = stat(scores(alone_of(section, references), "all")).mean
        if alone is not None:
            axes.axhline(alone, color=theme.ink, linewidth=1.2, linestyle=(0, (5, 3)), zorder=1)
        axes.set_ylabel(f"{section.metric}, %")
        finish_axes(axes, section.title, theme)
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(facecolor=_fault_colour(place), hatch=_hatch(place), edgecolor=theme.ink)
        for place in range(len(faults))
    ]
    handles.append(Line2D([], [], color=theme.ink, linewidth=1.2, linestyle=(0, (5, 3))))
    words = [*(fault.text for fault in faults), "local only, mean"]
    legend_below(figure, handles, words, theme, columns=min(LEGEND_COLUMNS, len(words)))
    return figure


def _boxes(axes: Any, section: Section, faults: Sequence[FaultSetting], theme: PlotTheme) -> None:
    names = []
    step = 0.84 / len(faults)
    for group, label in enumerate(section.labels):
        diverged = 0
        for place, fault in enumerate(faults):
            rows = [row for row in section.rows if (row.label, row.fault) == (label, fault)]
            final = [site.final for row in rows for site in row.sites]
            values = [100 * one for one in final if one is not None]
            diverged += len(final) - len(values)
            if not values:
                continue
            drawn = axes.boxplot(
                values, positions=[group + (place - (len(faults) - 1) / 2) * step],
                widths=step * 0.82, patch_artist=True, manage_ticks=False, whis=(5, 95),
                flierprops={"marker": ".", "markersize": 2.5, "markeredgecolor": theme.faint},
                medianprops={"color": theme.ink, "linewidth": 1.6},
                boxprops={"edgecolor": theme.ink, "linewidth": 0.7},
                whiskerprops={"color": theme.ink, "linewidth": 0.7},
                capprops={"color": theme.ink, "linewidth": 0.7},
            )  # fmt: skip
            for box in drawn["boxes"]:
                box.set_facecolor(_fault_colour(place))
                box.set_hatch(_hatch(place))
        note = f"\n({diverged} diverged)" if diverged else ""
        names.append(_wrapped(label) + note)
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.55, len(names) - 0.45)
    axes.set_ylim(-3, 103)


def curves(section: Section, references: References, theme: PlotTheme = LIGHT) -> Any:
    """A panel for each malfunction: the score over the number of bad clients, from none on."""
    faults = section.faults
    columns = min(2, len(faults))
    lines = -(-len(faults) // columns)
    figure = new_figure(5.6 * columns + 0.4, 3.3 * lines + 1.5, theme)
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).flatten()
    line_styles = styles([row for row in section.rows if row.fault != NO_FAULT], theme)
    cells = section.cells()
    for place, (axes, fault) in enumerate(zip(panels, faults, strict=False)):
        for label, style in line_styles.items():
            points = [
                (bad, stat(scores(cells[case].rows, "all")).mean)
                for bad in (0, *section.bads(fault))
                if (case := (label, fault if bad else NO_FAULT, bad)) in cells
            ]
            shown = [(bad, mean) for bad, mean in points if mean is not None]
            if any(bad for bad, _ in shown):
                axes.plot(*zip(*shown, strict=True), label=label, **style.kwargs())
        _reference_lines(axes, section, references, theme)
        axes.set_xticks([0, *section.bads(fault)])
        axes.set_xlabel(f"malfunctioning clients of {section.setting.clients}")
        axes.set_ylabel("" if place % columns else f"{section.metric}, %")
        axes.set_ylim(-3, 103)
        finish_axes(axes, fault.text, theme)
    for axes in panels[len(faults) :]:
        axes.set_visible(False)
    _shared_legend(figure, theme)
    return figure


def _reference_lines(axes: Any, section: Section, references: References, theme: PlotTheme) -> None:
    fedavg = [row for row in section.rows if row.rule == "fedavg" and row.fault == NO_FAULT]
    for rows, name, dashes in (
        (alone_of(section, references), "local only", (0, (5, 3))),
        (fedavg, "FedAvg, no malfunction", (0, (1, 1.6))),
    ):
        mean = stat(scores(rows, "all")).mean
        if mean is not None:
            axes.axhline(
                mean, color=theme.ink, linewidth=1.2, linestyle=dashes, zorder=2, label=name
            )


def gamma_plot(sections: Sequence[Section], theme: PlotTheme = LIGHT) -> Any:
    """The final score over γ; whiskers are the spread over clients."""
    figure = new_figure(max(5.4, 4.6 * len(sections)), 4.2, theme)
    panels = figure.subplots(1, len(sections), squeeze=False)[0]
    for axes, section in zip(panels, sections, strict=True):
        gammas = sorted({row.terms["gamma"] for row in section.rows if "gamma" in row.terms})
        # In reverse order, so that the guard has its usual colour.
        for place, (words, by_gamma) in enumerate(reversed(_by_gamma(section).items())):
            found = {gamma: stat(scores(rows, "all")) for gamma, rows in by_gamma.items()}
            points = [
                (gammas.index(gamma), one.mean, one.std_clients or 0.0)
                for gamma, one in found.items()
                if one.mean is not None
            ]
            if points:
                x, mean, spread = zip(*points, strict=True)
                colour = (theme.highlight, VERMILION, GREEN, PURPLE, ORANGE, GREY)[place % 6]
                axes.errorbar(
                    x, mean, yerr=spread, color=colour, marker=MARKERS[place % 9], linewidth=1.8,
                    markersize=5, elinewidth=0.9, capsize=3, label=words,
                )  # fmt: skip
        axes.set_xticks(range(len(gammas)), [f"{gamma:g}" for gamma in gammas])
        axes.set_xlabel("γ")
        axes.set_ylabel(f"{section.metric}, %")
        finish_axes(axes, section.setting.task, theme)
    _shared_legend(figure, theme, columns=2)
    return figure


def _by_gamma(section: Section) -> dict[str, dict[float, list[JobRow]]]:
    rows = [
        row
        for row in section.rows
        if "gamma" in row.terms and row.rule in _rules_with_gamma(section)
    ]
    others = {id(row): {k: v for k, v in row.terms.items() if k != "gamma"} for row in rows}
    found: dict[str, dict[float, list[JobRow]]] = defaultdict(lambda: defaultdict(list))
    for row in sorted(rows, key=lambda one: (one.rule_order, one.fault.order, one.terms["gamma"])):
        alike = [others[id(one)] for one in rows if one.rule == row.rule]
        name = RULE_NAMES.get(row.rule, row.rule)
        words = ", ".join([name, *differing(others[id(row)], alike)])
        words = words.replace(", guard True", " + guard").replace(", guard False", "")
        if row.fault != NO_FAULT:
            words += f", {row.bad} × {row.fault.text}"
        found[words][row.terms["gamma"]].append(row)
    return {words: dict(sorted(by.items())) for words, by in found.items()}


def _rules_with_gamma(section: Section) -> set[str]:
    """Rules that were run with several γ: all rules have the term, few use it."""
    gammas: dict[str, set[float]] = defaultdict(set)
    for row in section.rows:
        if "gamma" in row.terms:
            gammas[row.rule].add(row.terms["gamma"])
    return {rule for rule, values in gammas.items() if len(values) > 1} or {LIGHTYEAR}


def noise_plot(sections: Sequence[Section], theme: PlotTheme = LIGHT) -> Any:
    """By strength of noise: the score above, the share of noisy updates accepted below."""
    cases = [
        (section, bad)
        for section in sections
        for bad in sorted({row.bad for row in section.rows if row.fault.scale is not None})
    ]
    figure = new_figure(max(5.6, 4.2 * len(cases)), 6.6, theme)
    panels = figure.subplots(2, len(cases), squeeze=False, sharex="col")
    for column, (section, bad) in enumerate(cases):
        cells = section.cells()
        scales = sorted({f.scale for f in section.faults if f.kind == "ana" and f.scale})
        rows = [row for row in section.rows if row.fault.kind == "ana" and row.fault.scale]
        for label, style in styles(rows, theme).items():
            found = {
                scale: cells[place].rows
                for scale in scales
                if (place := (label, FaultSetting("ana", scale), bad)) in cells
            }
            means = {scale: stat(scores(rows, "all")).mean for scale, rows in found.items()}
            shares = {scale: accepted_share(counts(rows)) for scale, rows in found.items()}
            _line(panels[0, column], scales, means, label, style)
            percent = {scale: share and 100 * share for scale, share in shares.items()}
            _line(panels[1, column], scales, percent, label, style)
        name = f"{section.setting.task}, {bad} of {section.setting.clients}"
        for axes, what, heading in (
            (panels[0, column], f"{section.metric}, %", name),
            (panels[1, column], "malfunctioning accepted, %", ""),
        ):
            axes.set_xticks(range(len(scales)), [f"{scale:g}" for scale in scales])
            axes.set_ylim(-3, 103)
            axes.set_ylabel(what)
            finish_axes(axes, heading, theme)
        panels[1, column].set_xlabel("strength of the noise s, % of each weight")
        panels[1, column].xaxis.label.set_color(theme.faint)
    _shared_legend(figure, theme, columns=min(LEGEND_COLUMNS, 2 + 2 * len(cases)))
    return figure


def _line(
    axes: Any,
    places: Sequence[float],
    values: Mapping[float, float | None],
    label: str,
    style: Style,
) -> None:
    """Plot values at equal steps, so that their labels fit."""
    shown = [(places.index(x), y) for x, y in values.items() if y is not None]
    if shown:
        axes.plot(*zip(*shown, strict=True), label=label, **style.kwargs())


def _shared_legend(figure: Any, theme: PlotTheme, *, columns: int = LEGEND_COLUMNS) -> None:
    """One legend for all panels."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    width = min(columns, len(found) or 1)
    legend_below(figure, list(found.values()), list(found), theme, columns=width)


def _fault_colour(place: int) -> str:
    return FAULT_COLOURS[place % len(FAULT_COLOURS)]


def _wrapped(label: str) -> str:
    words = label.replace(" + ", " +\N{NO-BREAK SPACE}")
    return "\n".join(textwrap.wrap(words, 11, break_long_words=False)) or label


def _hatch(place: int) -> str:
    return HATCHES[place % len(HATCHES)]
