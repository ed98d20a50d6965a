"""The figure of the demo: each site's accuracy, the agreement by round, the last verdicts.

Hatching and marks repeat what the colours show.  Matplotlib is loaded only for drawing, and never
opens a window.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from lightyear_node.lab.demo_results import DemoResults, PeerJudgement
from lightyear_node.lab.federation_view import malfunction_text, short_names
from lightyear_node.lab.plot_style import GREY, LIGHT, VERMILION, PlotTheme, style_axes, title
from lightyear_node.types import PeerName

DPI = 144
NUMBERED_SITES_MAX = 6
"""With more sites, names and numbers at the bars would overlap."""


def draw(results: DemoResults, theme: PlotTheme = LIGHT) -> bytes:
    """Return a PNG with a headline and three panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sites = len(results.sites)
    width = 14.5 + 0.35 * max(0, sites - NUMBERED_SITES_MAX)
    figure = Figure(figsize=(width, 5.6), dpi=DPI, facecolor=theme.ground)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        1, 3, width_ratios=(1.25, 1.1, 0.95), wspace=0.2,
        left=0.045, right=0.985, top=0.72, bottom=0.12,
    )  # fmt: skip
    panels = [figure.add_subplot(grid[0, column]) for column in range(3)]
    headline, detail = headline_and_detail(results)
    left = 0.045
    figure.text(left, 0.945, headline, fontsize=17, weight="bold", color=theme.ink, va="center")
    figure.text(left, 0.885, detail, fontsize=11, color=theme.faint, va="center")
    _bars(panels[0], results, theme)
    _agreement(panels[1], results, theme)
    _matrix(panels[2], results, theme)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor=theme.ground)
    return buffer.getvalue()


def headline_and_detail(results: DemoResults) -> tuple[str, str]:
    """Return a sentence that the numbers support, and the numbers."""
    counts = results.verdict_counts()
    bad, let_in = len(results.bad), counts["malfunctioning_accepted"]
    gained = results.honest_federated - results.honest_alone
    together = (
        "Learning together beats learning alone"
        if gained > 0.005
        else "Learning together is as good as learning alone"
        if gained > -0.005
        else "Learning together did worse than learning alone"
    )
    if bad == 0:
        headline = together
    else:
        who = "the malfunctioning site" if bad == 1 else f"the {bad} malfunctioning sites"
        kept_out = f"{who} {'is' if bad == 1 else 'are'} kept out"
        got_in = f"{who} got in {let_in} time{'s' if let_in != 1 else ''}"
        joint = "and" if (let_in == 0) == (gained > -0.005) else "but"
        headline = f"{together}, {joint} {kept_out if let_in == 0 else got_in}"
    whose = "honest sites" if bad else "sites"
    detail = (
        f"Mean accuracy of the {whose}: {results.honest_alone:.3f} alone,"
        f" {results.honest_federated:.3f} federated,"
        f" {results.everyone_averaged:.3f} if everyone is averaged in."
        f"  Honest updates accepted: {counts['honest_accepted']}"
        f" of {counts['honest_accepted'] + counts['honest_rejected']}"
    )
    if bad:
        detail += f"; malfunctioning: {let_in} of {let_in + counts['malfunctioning_rejected']}"
    return headline, detail + "."


def _bars(axes: Any, results: DemoResults, theme: PlotTheme) -> None:
    title(axes, "What each site ends with", "accuracy on its own test data", theme)
    series = [
        ("alone", [site.alone for site in results.sites], GREY),
        ("everyone averaged in", [site.averaged for site in results.sites], VERMILION),
        ("federated", [site.federated for site in results.sites], theme.highlight),
    ]
    bar = 0.26
    for place, (label, values, colour) in enumerate(series):
        for index, (site, value) in enumerate(zip(results.sites, values, strict=True)):
            x = index + (place - 1) * (bar + 0.02)
            axes.bar(
                x, value, bar, color=colour, label=label if index == 0 else None,
                hatch="////" if site.malfunctioning else None,
                edgecolor=theme.ground, linewidth=0,
            )  # fmt: skip
            if len(results.sites) <= NUMBERED_SITES_MAX:
                weight = "bold" if label == "federated" else "normal"
                axes.text(
                    x, value + 0.012, f"{value:.2f}".lstrip("0") if value < 1 else "1",
                    ha="center", fontsize=8.5, color=theme.ink, weight=weight,
                )  # fmt: skip
    axes.set_ylim(0, 1.08)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", ".25", ".5", ".75", "1"])
    axes.set_xticks(range(len(results.sites)), _labels(results))
    _mark_bad(axes.get_xticklabels(), results)
    axes.set_xlim(-0.55, len(results.sites) - 0.45)
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)
    style_axes(axes, theme)
    handles, labels = axes.get_legend_handles_labels()
    legend = axes.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(-0.01, 0.99), ncols=3, frameon=False,
        fontsize=9, handlelength=1, handleheight=1, columnspacing=1.4, borderaxespad=0,
        labelcolor=theme.ink,
    )  # fmt: skip
    for patch in legend.get_patches():
        patch.set_hatch(None)


def _agreement(axes: Any, results: DemoResults, theme: PlotTheme) -> None:
    title(
        axes,
        "How well the models agree",
        "mean of a peer's judges; × rejected, above τ by the guard",
        theme,
    )
    scored = [one for one in results.judgements if one.score is not None and one.delivered]
    honest = [one for one in scored if one.peer not in results.bad]
    for peers, colour, name in (
        ([site.name for site in results.honest], theme.highlight, "honest peers"),
        (sorted(results.bad), VERMILION, "malfunctioning"),
    ):
        for place, peer in enumerate(peers):
            rounds, means = _means([one for one in scored if one.peer == peer])
            axes.plot(
                rounds, means, color=colour, linewidth=1.8, alpha=0.9, zorder=3,
                label=name if place == 0 else None,
                marker="o", markersize=3.2,
            )  # fmt: skip
    if honest:
        rounds = sorted({one.round for one in honest})
        by_round = [[_score(one) for one in honest if one.round == r] for r in rounds]
        axes.fill_between(
            rounds, [min(values) for values in by_round], [max(values) for values in by_round],
            color=theme.highlight, alpha=0.15, linewidth=0, zorder=1,
        )  # fmt: skip
    for rejected, colour in (
        ([one for one in honest if not one.accepted], theme.highlight),
        ([one for one in scored if one.peer in results.bad and not one.accepted], VERMILION),
    ):
        axes.scatter(
            [one.round for one in rejected], [_score(one) for one in rejected],
            marker="x", s=34, linewidths=1.4, color=colour, zorder=4, alpha=0.85,
        )  # fmt: skip
    axes.axhline(results.tau, color=theme.ink, linewidth=1.1, linestyle=(0, (5, 3)), zorder=2)
    axes.annotate(
        "τ", (1, results.tau), (4, 0), xycoords=("axes fraction", "data"),
        textcoords="offset points", fontsize=11, color=theme.ink, va="center",
    )  # fmt: skip
    lowest = min([_score(one) for one in scored] + [results.tau])
    axes.set_ylim(max(-0.05, lowest - 0.1), 1.03)
    axes.set_xlim(-0.4, results.rounds - 0.6)
    step = max(1, round(results.rounds / 10))
    axes.set_xticks(range(0, results.rounds, step))
    axes.set_xlabel("round", fontsize=9, color=theme.faint)
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)
    style_axes(axes, theme)
    if scored:
        axes.legend(
            loc="lower left", bbox_to_anchor=(-0.01, 0.99), ncols=2, frameon=False, fontsize=9,
            handlelength=1.4, columnspacing=1.4, borderaxespad=0, labelcolor=theme.ink,
        )  # fmt: skip


def _matrix(axes: Any, results: DemoResults, theme: PlotTheme) -> None:
    title(axes, "Who accepts whom in the end", "a row judges a column", theme)
    names = [site.name for site in results.sites]
    last = results.last_round()
    font = max(5.0, 11 - 0.45 * max(0, len(names) - 5))
    for row, judge in enumerate(names):
        for column, peer in enumerate(names):
            one = last.get((judge, peer))
            colour = (
                theme.grid if one is None else theme.accepted if one.accepted else theme.rejected
            )
            axes.add_patch(_tile(column, row, colour))
            if one is None:
                continue
            mark = "✓" if one.accepted else "✗"
            number = f"\n{one.score:.2f}" if one.score is not None and len(names) <= 12 else ""
            axes.text(
                column, row, mark + number, ha="center", va="center", fontsize=font,
                color=theme.ink, linespacing=1.25, family="DejaVu Sans",
            )  # fmt: skip
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_aspect("equal")
    axes.set_xticks(range(len(names)), _labels(results, full=False))
    axes.set_yticks(range(len(names)), _labels(results, full=False))
    for ticks in (axes.get_xticklabels(), axes.get_yticklabels()):
        _mark_bad(ticks, results)
    style_axes(axes, theme)


def _tile(column: int, row: int, colour: str) -> Any:
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch(
        (column - 0.43, row - 0.43), 0.86, 0.86,
        boxstyle="round,pad=0,rounding_size=0.1", facecolor=colour, linewidth=0,
    )  # fmt: skip


def _means(judged: Sequence[PeerJudgement]) -> tuple[list[int], list[float]]:
    rounds = sorted({one.round for one in judged})
    return rounds, [fmean(_score(one) for one in judged if one.round == r) for r in rounds]


def _score(one: PeerJudgement) -> float:
    assert one.score is not None
    return one.score


def _labels(results: DemoResults, *, full: bool = True) -> list[str]:
    names: list[PeerName] = [site.name for site in results.sites]
    if not full or len(names) > NUMBERED_SITES_MAX:
        return list(short_names(names).values())
    fault = malfunction_text(results.malfunction)
    if len(results.bad) > 1:
        fault = fault.replace(" ", "\n")  # neighbouring labels must not overlap
    return [f"{name}\n{fault}" if name in results.bad else name for name in names]


def _mark_bad(labels: Sequence[Any], results: DemoResults) -> None:
    for label, site in zip(labels, results.sites, strict=True):
        if site.malfunctioning:
            label.set_color(VERMILION)
            label.set_weight("bold")
