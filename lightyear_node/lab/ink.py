"""What every picture here is drawn with: colours, a light and a dark ground, quiet axes.

Colours are Okabe and Ito's, which colour-blind readers can tell apart.  Matplotlib is loaded only
when something is drawn, and never opens a window.
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
class Paper:
    """What the picture is drawn on."""

    ground: str
    ink: str
    faint: str
    grid: str
    together: str
    accepted: str
    rejected: str


LIGHT = Paper("#FFFFFF", "#1F2328", "#656D76", "#E4E7EB", BLUE, "#D3E6F5", "#FBDCC8")
DARK = Paper("#14171C", "#E6E8EB", "#9BA3AE", "#2B3038", SKY, "#17405E", "#6B3008")


def title(axes: Any, what: str, how: str, paper: Paper) -> None:
    axes.set_title("")
    axes.annotate(
        what, (0, 1), (0, 36), xycoords="axes fraction", textcoords="offset points",
        fontsize=12, weight="bold", color=paper.ink, annotation_clip=False,
    )  # fmt: skip
    axes.annotate(
        how, (0, 1), (0, 22), xycoords="axes fraction", textcoords="offset points",
        fontsize=9.5, color=paper.faint, annotation_clip=False,
    )  # fmt: skip


def bare(axes: Any, paper: Paper) -> None:
    axes.set_facecolor(paper.ground)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, labelsize=9.5)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        if label.get_weight() != "bold":
            label.set_color(paper.ink)


def blank(width: float, height: float, paper: Paper) -> Any:
    """An empty figure that makes room for its labels and legends by itself."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise _nothing_to_draw_with() from None
    figure = Figure(figsize=(width, height), facecolor=paper.ground, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def quiet(axes: Any, heading: str, paper: Paper, *, grid: str = "y") -> None:
    """A heading at the left, lines to read values by, and nothing else."""
    axes.set_title(heading, loc="left", fontsize=11, weight="bold", color=paper.ink)
    axes.grid(axis=grid, color=paper.grid, linewidth=0.8)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(paper.faint)
        label.set_fontsize(9.5)
    bare(axes, paper)


def legend_below(
    figure: Any, handles: Any, labels: Sequence[str], paper: Paper, *, columns: int
) -> None:
    if handles:
        # About what a column takes, in inches, so that long names do not leave the picture.
        column = 0.7 + 0.078 * max(map(len, labels))
        columns = max(1, min(columns, int(figure.get_size_inches()[0] / column)))
        figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, frameon=False,
            fontsize=9.5, labelcolor=paper.ink, handlelength=2.6, columnspacing=1.6,
        )  # fmt: skip


def as_png(figure: Any, *, dpi: int = 150) -> bytes:
    return _saved(figure, "png", dpi=dpi, metadata={"Software": None})


def as_svg(figure: Any) -> bytes:
    """Letters as shapes: the picture is the same whatever fonts the reader has."""
    return _saved(figure, "svg", dpi=150, metadata={"Date": None, "Creator": None})


def plain_text() -> AbstractContextManager[None]:
    """A dollar in somebody's label is a dollar, not the beginning of a formula."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise _nothing_to_draw_with() from None
    how: dict[Any, Any] = {
        "text.parse_math": False,
        "svg.hashsalt": "lightyear-node",
        "svg.fonttype": "path",
    }
    context: AbstractContextManager[None] = mpl.rc_context(how)
    return context


def _nothing_to_draw_with() -> ConfigError:
    return ConfigError(
        "matplotlib is not installed, so nothing can be drawn",
        hint="pip install 'lightyear-node[demo]'",
    )


def _saved(figure: Any, kind: str, **how: Any) -> bytes:
    buffer = io.BytesIO()
    with plain_text():
        figure.savefig(buffer, format=kind, facecolor=figure.get_facecolor(), **how)
    return buffer.getvalue()
