"""The style of all figures: colours, a light and a dark theme, axes.

The colours are those of Okabe and Ito, for colour-blind readers.  Matplotlib is loaded only for
drawing, and never opens a window.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from lightyear_node.errors import ConfigError

BLUE, VERMILION, SKY, GREY = "#0072B2", "#D55E00", "#56B4E9", "#9AA0A6"
ORANGE, GREEN, PURPLE, YELLOW = "#E69F00", "#009E73", "#CC79A7", "#C9B400"


@dataclass(frozen=True, slots=True)
class PlotTheme:
    """Colours of a light or dark figure."""

    ground: str
    ink: str
    faint: str
    grid: str
    highlight: str
    accepted: str
    rejected: str


LIGHT = PlotTheme("#FFFFFF", "#1F2328", "#656D76", "#E4E7EB", BLUE, "#D3E6F5", "#FBDCC8")
DARK = PlotTheme("#14171C", "#E6E8EB", "#9BA3AE", "#2B3038", SKY, "#17405E", "#6B3008")


def title(axes: Any, what: str, how: str, theme: PlotTheme) -> None:
    axes.set_title("")
    axes.annotate(
        what, (0, 1), (0, 36), xycoords="axes fraction", textcoords="offset points",
        fontsize=12, weight="bold", color=theme.ink, annotation_clip=False,
    )  # fmt: skip
    axes.annotate(
        how, (0, 1), (0, 22), xycoords="axes fraction", textcoords="offset points",
        fontsize=9.5, color=theme.faint, annotation_clip=False,
    )  # fmt: skip


def style_axes(axes: Any, theme: PlotTheme) -> None:
    axes.set_facecolor(theme.ground)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, labelsize=9.5)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        if label.get_weight() != "bold":
            label.set_color(theme.ink)


def new_figure(width: float, height: float, theme: PlotTheme) -> Any:
    """An empty figure whose layout fits its labels and legends."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise _no_matplotlib() from None
    figure = Figure(figsize=(width, height), facecolor=theme.ground, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def finish_axes(axes: Any, heading: str, theme: PlotTheme, *, grid: str = "y") -> None:
    """Add a heading and a grid; remove frame and ticks."""
    axes.set_title(heading, loc="left", fontsize=11, weight="bold", color=theme.ink)
    axes.grid(axis=grid, color=theme.grid, linewidth=0.8)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(theme.faint)
        label.set_fontsize(9.5)
    style_axes(axes, theme)


def legend_below(
    figure: Any, handles: Any, labels: Sequence[str], theme: PlotTheme, *, columns: int
) -> None:
    if handles:
        # Approximate width of a column in inches, so that long names stay inside the figure.
        column = 0.7 + 0.078 * max(map(len, labels))
        columns = max(1, min(columns, int(figure.get_size_inches()[0] / column)))
        figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, frameon=False,
            fontsize=9.5, labelcolor=theme.ink, handlelength=2.6, columnspacing=1.6,
        )  # fmt: skip


def as_png(figure: Any, *, dpi: int = 150) -> bytes:
    return _saved(figure, "png", dpi=dpi, metadata={"Software": None})


def as_svg(figure: Any) -> bytes:
    """Text as shapes: the figure does not depend on installed fonts."""
    return _saved(figure, "svg", dpi=150, metadata={"Date": None, "Creator": None})


def without_math_text() -> AbstractContextManager[None]:
    """Draw dollar signs in labels as text, not as formulas; deterministic SVG."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise _no_matplotlib() from None
    how: dict[Any, Any] = {
        "text.parse_math": False,
        "svg.hashsalt": "lightyear-node",
        "svg.fonttype": "path",
    }
    context: AbstractContextManager[None] = mpl.rc_context(how)
    return context


def _no_matplotlib() -> ConfigError:
    return ConfigError(
        "matplotlib is not installed, so nothing can be drawn",
        hint="pip install 'lightyear-node[demo]'",
    )


def _saved(figure: Any, kind: str, **how: Any) -> bytes:
    buffer = io.BytesIO()
    with without_math_text():
        figure.savefig(buffer, format=kind, facecolor=figure.get_facecolor(), **how)
    return buffer.getvalue()
