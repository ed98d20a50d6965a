"""What exchanging models costs, as arithmetic on the measured size of one update.

With n sites that all send to each other, a round moves n(n−1) updates: each site sends n−1 and
receives n−1.  Through a server it moves 2n, all of which pass the server: n in and n out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightyear_node.lab.ink import (
    GREEN,
    LIGHT,
    ORANGE,
    PURPLE,
    VERMILION,
    Paper,
    blank,
    legend_below,
    quiet,
)
from lightyear_node.lab.view import size

SITES = range(2, 17)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one round, sent and received."""

    mesh: int
    mesh_site: int
    server_based: int
    server: int
    server_client: int


def traffic(sites: int, update_bytes: int) -> Traffic:
    return Traffic(
        mesh=sites * (sites - 1) * update_bytes,
        mesh_site=2 * (sites - 1) * update_bytes,
        server_based=2 * sites * update_bytes,
        server=2 * sites * update_bytes,
        server_client=2 * update_bytes,
    )


def cost_plot(updates: Mapping[str, tuple[int, int]], paper: Paper = LIGHT) -> Any:
    """`updates`: by task, the bytes of one update and the number of clients it was measured with.

    A marker stands at that number.
    """
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter

    figure = blank(10.5, 4.6, paper)
    panels = figure.subplots(1, 2)
    kinds = (
        (panels[0], "mesh", "-"),
        (panels[0], "server_based", (0, (5, 2))),
        (panels[1], "mesh_site", "-"),
        (panels[1], "server", (0, (5, 2))),
        (panels[1], "server_client", (0, (1, 1.6))),
    )
    colours = (paper.together, VERMILION, GREEN, PURPLE, ORANGE, paper.faint)
    for place, (update_bytes, clients) in enumerate(updates.values()):
        for axes, what, dashes in kinds:
            axes.plot(
                SITES, [getattr(traffic(n, update_bytes), what) for n in SITES],
                color=colours[place % 6], linestyle=dashes, linewidth=1.7,
                marker="o", markevery=[clients - 2] if clients in SITES else [],
            )  # fmt: skip
    for axes, heading in ((panels[0], "in all"), (panels[1], "at one place, in and out")):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
        axes.minorticks_off()
        axes.set_xticks([2, 4, 6, 8, 10, 12, 14, 16])
        axes.set_xlabel("sites")
        axes.set_ylabel("bytes of one round")
        quiet(axes, heading, paper)
    handles = [Line2D([], [], color=paper.ink, linestyle=style) for style in ("-", (0, (5, 2)))]
    handles.append(Line2D([], [], color=paper.ink, linestyle=(0, (1, 1.6))))
    words = ["peer to peer (all; one site)", "server (all; the server)", "a server's client"]
    for place, (task, (update_bytes, _)) in enumerate(updates.items()):
        handles.append(Line2D([], [], color=colours[place % 6], linewidth=5))
        words.append(f"{task}, update of {size(update_bytes)}")
    legend_below(figure, handles, words, paper, columns=3)
    return figure
