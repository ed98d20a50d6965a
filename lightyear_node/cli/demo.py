"""`demo`: a whole federation on this machine, with one broken site."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightyear_node.cli import app
from lightyear_node.cli.common import Format, FormatOption, examples, show

if TYPE_CHECKING:
    from lightyear_node.lab.results import Results


class Malfunction(StrEnum):
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
    sites: Annotated[int, typer.Option(help="How many sites.", min=2, max=16)] = 5,
    rounds: Annotated[int, typer.Option(help="How many rounds.", min=1, max=1000)] = 8,
    malfunction: Annotated[
        Malfunction, typer.Option(help="What is wrong with the broken sites' models.")
    ] = Malfunction.SFA,
    bad: Annotated[int, typer.Option(help="How many sites are broken.", min=0)] = 1,
    seed: Annotated[int, typer.Option(help="Seed of data, weights and noise.", min=0)] = 7,
    keep: Annotated[
        Path | None, typer.Option(help="Keep the sites' folders and the report here.")
    ] = None,
    no_view: Annotated[bool, typer.Option("--no-view", help="No live view.")] = False,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Keep the sites and their page afterwards, until Ctrl-C."),
    ] = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Run a federation of real nodes on loopback and watch a broken site being rejected."""
    from lightyear_node.lab.demo import Options, print_summary, run

    options = Options(
        sites=sites,
        rounds=rounds,
        malfunction=str(malfunction),
        bad=bad if malfunction is not Malfunction.NONE else 0,
        seed=seed,
        keep=keep,
        view=not no_view,
        serve=serve,
    )

    def tell(results: Results) -> None:
        show(format, results.to_plain(), lambda: print_summary(results))

    run(options, tell=tell)
