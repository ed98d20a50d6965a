"""`demo`: a federation on this machine, with one malfunctioning site."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightyear_node.cli import app
from lightyear_node.cli.common import Format, FormatOption, examples, show

if TYPE_CHECKING:
    from lightyear_node.lab.demo_results import DemoResults


class DemoMalfunction(StrEnum):
    ANA = "ana"
    SFA = "sfa"
    RANDOM = "random"
    DYNAMIC = "dynamic"
    NONE = "none"


@app.command(
    epilog=examples(
        "lightyear-node demo",
        "lightyear-node demo --malfunction ana --bad 2 --rounds 12 --keep demo",
    )
)
def demo(
    sites: Annotated[int, typer.Option(help="Number of sites.", min=2, max=16)] = 5,
    rounds: Annotated[int, typer.Option(help="Number of rounds.", min=1, max=1000)] = 8,
    malfunction: Annotated[
        DemoMalfunction, typer.Option(help="Malfunction of the bad sites.")
    ] = DemoMalfunction.SFA,
    bad: Annotated[int, typer.Option(help="Number of malfunctioning sites.", min=0)] = 1,
    seed: Annotated[int, typer.Option(help="Seed for data, weights and noise.", min=0)] = 7,
    keep: Annotated[
        Path | None, typer.Option(help="Keep the sites' folders and the report here.")
    ] = None,
    no_view: Annotated[bool, typer.Option("--no-view", help="Disable the live view.")] = False,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Keep the sites running afterwards, until Ctrl-C."),
    ] = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Run a federation of real nodes on this machine and watch a bad site being rejected."""
    from lightyear_node.lab.demo import DemoOptions, print_summary, run

    options = DemoOptions(
        sites=sites,
        rounds=rounds,
        malfunction=str(malfunction),
        bad=bad if malfunction is not DemoMalfunction.NONE else 0,
        seed=seed,
        keep=keep,
        view=not no_view,
        serve=serve,
    )

    def on_results(results: DemoResults) -> None:
        show(format, results.to_plain(), lambda: print_summary(results))

    run(options, on_results=on_results)
