"""Traffic of one round, computed from the measured size of one update.

Peer to peer, n sites transfer n(n−1) updates: each site sends n−1 and receives n−1.  Through a
server they transfer 2n: the server receives n and sends n.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightyear_node.lab.federation_view import size
from lightyear_node.lab.plot_style import (
    GREEN,
    LIGHT,
    ORANGE,
    PURPLE,
    VERMILION,
    PlotTheme,
    finish_axes,
    legend_below,
    new_figure,
)

SITES = range(2, 17)


@dataclass(frozen=True, slots=True)
class RoundTraffic:
    """Bytes of one round, sent and received."""

    mesh: int
    mesh_site: int
    server_based: int
    server: int
    server_client: int


def traffic(sites: int, update_bytes: int) -> RoundTraffic:
    return RoundTraffic(
        mesh=sites * (sites - 1) * update_bytes,
        mesh_site=2 * (sites - 1) * update_bytes,
        server_based=2 * sites * update_bytes,
        server=2 * sites * update_bytes,
        server_client=2 * update_bytes,
    )


def cost_plot(updates: Mapping[str, tuple[int, int]], theme: PlotTheme = LIGHT) -> Any:
    """`updates`: by task, the bytes of one update and the number of clients it was measured with.

    A marker shows that number.
    """
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter

    figure = new_figure(10.5, 4.6, theme)
    panels = figure.subplots(1, 2)
    kinds = (
        (panels[0], "mesh", "-"),
        (panels[0], "server_based", (0, (5, 2))),
        (panels[1], "mesh_site", "-"),
        (panels[1], "server", (0, (5, 2))),
        (panels[1], "server_client", (0, (1, 1.6))),
    )
    colours = (theme.highlight, VERMILION, GREEN, PURPLE, ORANGE, theme.faint)
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
        finish_axes(axes, heading, theme)
    handles = [Line2D([], [], color=theme.ink, linestyle=style) for style in ("-", (0, (5, 2)))]
    handles.append(Line2D([], [], color=theme.ink, linestyle=(0, (1, 1.6))))
    words = ["peer to peer (all; one site)", "server (all; the server)", "a server's client"]
    for place, (task, (update_bytes, _)) in enumerate(updates.items()):
        handles.append(Line2D([], [], color=colours[place % 6], linewidth=5))
        words.append(f"{task}, update of {size(update_bytes)}")
    legend_below(figure, handles, words, theme, columns=3)
    return figure
