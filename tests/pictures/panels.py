"""Draws the Grafana dashboard's panels with matplotlib, in the dashboard's layout."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle
from typing import Any

from lightyear_node.lab.plot_style import (
    BLUE,
    GREEN,
    LIGHT,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    as_png,
    style_axes,
)
from tests.support.grafana_board import Panel, load

ROWS = ("Now", "Peers", "Model", "Time and traffic")
COLUMNS = 24
WIDTH_IN, ROW_IN = 15.0, 0.29
TITLE_ROWS = 3.3
"""Grid rows for the title."""
PAPER = LIGHT
COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, YELLOW)
MARKERS = ("o", "s", "^", "X", "D", "v", "P")
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "||||", "----")


@dataclass(frozen=True)
class Series:
    ref: str
    name: str
    labels: Mapping[str, str]
    points: list[tuple[float, float]]

    @property
    def last(self) -> float:
        return self.points[-1][1]


def draw(found: Mapping[str, list[Series]], about: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = _in_shown_rows(load()["panels"])
    height = max(one["gridPos"]["y"] + one["gridPos"]["h"] for one in shown) + TITLE_ROWS + 0.4
    figure = Figure(figsize=(WIDTH_IN, height * ROW_IN), facecolor=PAPER.ground)
    FigureCanvasAgg(figure)
    for text, line, size in ((load()["title"], 1.3, 16), (about, 2.5, 10.5)):
        colour = PAPER.ink if size > 11 else PAPER.faint
        figure.text(0.012, 1 - line / height, text, fontsize=size, color=colour)
    end = max(at for series in found.values() for one in series for at, _ in one.points)
    for panel in shown:
        place = panel["gridPos"]
        x, width = place["x"] / COLUMNS, place["w"] / COLUMNS
        top, tall = 1 - (place["y"] + TITLE_ROWS) / height, place["h"] / height
        if panel["type"] == "row":
            figure.text(
                0.012, top - 0.75 * tall, panel["title"], fontsize=13, weight="bold",
                color=PAPER.faint,
            )  # fmt: skip
            continue
        figure.text(
            x + 0.012, top - 0.9 / height, panel["title"], fontsize=10.5, weight="bold",
            color=PAPER.ink,
        )  # fmt: skip
        box = (x + 0.038, top - tall + 1.5 / height, width - 0.055, tall - 2.75 / height)
        DRAW_FUNCTIONS[panel["type"]](figure, box, panel, found[panel["title"]], end)
    return as_png(figure, dpi=110)


def _in_shown_rows(every: Sequence[Panel]) -> list[Panel]:
    chosen: list[Panel] = []
    row = ""
    for panel in every:
        row = panel["title"] if panel["type"] == "row" else row
        chosen += [panel] if row in ROWS else []
    return chosen


def _stat(figure: Any, box: Any, panel: Panel, series: list[Series], end: float) -> None:
    x, y, width, height = box
    if not series:
        nothing = panel["fieldConfig"]["defaults"].get("noValue", "")
        figure.text(x - 0.024, y + 0.45 * height, nothing, fontsize=15, color=PAPER.ink)
    names_only = panel["options"]["textMode"] == "name"
    for number, one in enumerate(series):
        left = x - 0.024 + number * 1.05 * width / len(series)
        large, colour = one.name if names_only else in_unit(panel, one.last), _threshold(panel, one)
        size = 13 if names_only else 20
        figure.text(left, y + 0.45 * height, large, fontsize=size, weight="bold", color=colour)
        if not names_only:
            figure.text(left, y - 0.05 * height, one.name, fontsize=8.5, color=PAPER.faint)


def _threshold(panel: Panel, one: Series) -> str:
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    reached = [s["color"] for s in steps if s["value"] is None or one.last >= s["value"]]
    return str(reached[-1])


def _timeline(figure: Any, box: Any, panel: Panel, series: list[Series], end: float) -> None:
    axes = _axes(figure, box, end)
    [mapping] = panel["fieldConfig"]["defaults"]["mappings"]
    rows = sorted(series, key=lambda one: one.name, reverse=True)
    for row, one in enumerate(rows):
        for start, stop, value in _intervals(one.points, end):
            state = mapping["options"][str(int(value))]
            axes.barh(row, stop - start, 0.78, left=start, color=state["color"], linewidth=0)
            fits = (stop - start) / end
            words = state["text"] if fits > 0.07 else state["text"][0] if fits > 0.012 else ""
            axes.text(start + end * 0.004, row, words, va="center", fontsize=8.5, color="white")
    axes.set_yticks(range(len(rows)), [one.name for one in rows])
    axes.grid(visible=False)
    position = axes.get_position()
    axes.set_position((position.x0 + 0.06, position.y0, position.width - 0.06, position.height))


def _intervals(
    points: Sequence[tuple[float, float]], end: float
) -> list[tuple[float, float, float]]:
    """Return start, end and value of every interval with a constant value."""
    starts: list[tuple[float, float]] = []
    for at, value in points:
        if not starts or starts[-1][1] != value:
            starts.append((at, value))
    stops = [at for at, _ in starts[1:]] + [end]
    return [(at, stop, value) for (at, value), stop in zip(starts, stops, strict=True)]


def _graph(figure: Any, box: Any, panel: Panel, series: list[Series], end: float) -> None:
    axes = _axes(figure, box, end)
    defaults = panel["fieldConfig"]["defaults"]
    stacked = "stacking" in defaults["custom"]
    ordered = sorted(series, key=lambda one: (one.ref, one.name))
    if not ordered:
        axes.text(0.5, 0.5, "none", ha="center", transform=axes.transAxes, color=PAPER.faint)
    elif stacked:
        _stack(axes, panel, ordered, end)
    else:
        _lines(axes, panel, ordered)
    bottom, top = axes.get_ylim()
    axes.set_ylim(defaults.get("min", bottom), defaults.get("max", top) * 1.02)
    axes.yaxis.set_major_formatter(lambda value, _: in_unit(panel, value))
    axes.locator_params(axis="y", nbins=5)
    if ordered:
        axes.legend(
            loc="upper left", bbox_to_anchor=(-0.05, -0.12), ncols=len(ordered),
            frameon=False,
            fontsize=7.8, labelcolor=PAPER.ink, columnspacing=0.9, handlelength=1.9,
            handletextpad=0.5, borderaxespad=0,
        )  # fmt: skip


def _lines(axes: Any, panel: Panel, series: list[Series]) -> None:
    for one, colour, marker in zip(series, cycle(COLOURS), cycle(MARKERS)):
        override = _override(panel, one.name)
        dashed = "custom.lineStyle" in override
        plain = override.get("custom.showPoints") == "never"
        times, values = zip(*one.points, strict=True)
        axes.plot(
            times, values, label=one.name, linewidth=1.7,
            color=PAPER.ink if plain else colour, linestyle=(0, (5, 3)) if dashed else "-",
            marker=None if plain else marker, markevery=max(1, len(times) // 12), markersize=4.5,
        )  # fmt: skip


def _stack(axes: Any, panel: Panel, series: list[Series], end: float) -> None:
    """Draw stacked bars, each with its own colour and hatching."""
    below: dict[float, float] = {}
    step = 1.0
    for one, spare, hatch in zip(series, cycle(COLOURS), cycle(HATCHES)):
        colour = _override(panel, one.name).get("color", {"fixedColor": spare})["fixedColor"]
        times = [at for at, _ in one.points]
        axes.bar(
            times, [value for _, value in one.points], step,
            bottom=[below.get(at, 0.0) for at in times], label=one.name, color=colour,
            hatch=hatch, edgecolor=PAPER.ground, linewidth=0,
        )  # fmt: skip
        for at, value in one.points:
            below[at] = below.get(at, 0.0) + (value if value == value else 0.0)


def _override(panel: Panel, name: str) -> dict[str, Any]:
    return {
        each["id"]: each["value"]
        for override in panel["fieldConfig"]["overrides"]
        if override["matcher"]["id"] == "byRegexp"
        and re.search(override["matcher"]["options"], name)
        for each in override["properties"]
    }


def _table(figure: Any, box: Any, panel: Panel, series: list[Series], end: float) -> None:
    axes = figure.add_axes((box[0] - 0.024, box[1] - 0.01, box[2] + 0.03, box[3] + 0.012))
    axes.set_axis_off()
    names = panel["transformations"][1]["options"]["renameByName"]
    letters = [target["refId"] for target in panel["targets"]]
    values = {(one.labels["peer"], one.ref): one.last for one in series}
    peers = sorted({peer for peer, _ in values})
    head = ["Peer", *(names[f"Value #{letter}"].replace(" ", "\n") for letter in letters)]
    cells = [
        [peer, *(_cell(panel, names[f"Value #{r}"], values.get((peer, r))) for r in letters)]
        for peer in peers
    ]
    table = axes.table([head, *cells], cellLoc="left", loc="upper left", edges="horizontal")
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    for (row, _), cell in table.get_celld().items():
        cell.set_height(0.24 if row == 0 else 0.17)
        cell.set_edgecolor(PAPER.grid)
        cell.get_text().set_color(PAPER.faint if row == 0 else PAPER.ink)


def _cell(panel: Panel, column: str, value: float | None) -> str:
    if value is None or value != value:
        return ""
    found: dict[str, Any] = {}
    for override in panel["fieldConfig"]["overrides"]:
        if override["matcher"]["options"] == column:
            found |= {each["id"]: each["value"] for each in override["properties"]}
    if "mappings" in found:
        return str(found["mappings"][0]["options"][str(int(value))]["text"])
    if "unit" in found:
        return in_unit({"fieldConfig": {"defaults": {"unit": found["unit"]}}}, value)
    return f"{value:.{found.get('decimals', 0)}f}"


def _axes(figure: Any, box: Any, end: float) -> Any:
    axes = figure.add_axes(box)
    axes.grid(axis="y", color=PAPER.grid, linewidth=0.8)
    axes.set_xlim(0, end)
    axes.xaxis.set_major_formatter(lambda at, _: f"{at // 60:.0f}:{at % 60:02.0f}")
    axes.locator_params(axis="x", nbins=6)
    style_axes(axes, PAPER)
    axes.tick_params(labelsize=8.5, pad=5)
    return axes


def in_unit(panel: Panel, value: float) -> str:
    match panel["fieldConfig"]["defaults"].get("unit"):
        case "percentunit":
            return f"{value:.0%}"
        case "s":
            return f"{value:.3g} s"
        case "Bps":
            return f"{value / 1000:.0f} kB/s"
        case "dtdurations":
            days = timedelta(seconds=round(value)).days
            return f"{days} days" if days else f"{value:.0f} s"
        case _:
            return f"{value:.4g}"


DRAW_FUNCTIONS = {"stat": _stat, "state-timeline": _timeline, "timeseries": _graph, "table": _table}
