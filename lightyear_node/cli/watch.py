"""`status` and `health`: what a running node is doing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from lightyear_node.cli import EXIT_UNHEALTHY, app
from lightyear_node.cli.common import (
    Format,
    FormatOption,
    HomeOption,
    console,
    examples,
    show,
    state_dir_of,
)
from lightyear_node.cli.pictures import Status, picture


@app.command(
    epilog=examples(
        "lightyear-node status",
        "lightyear-node status --watch",
        "lightyear-node status --watch --format jsonl >> status.jsonl",
    )
)
def status(
    home: HomeOption = Path(),
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Go on, and show what changes, until q or Ctrl-C.")
    ] = False,
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks of --watch.", min=0.1, max=3600)
    ] = 1.0,
    format: FormatOption = Format.TABLE,
) -> None:
    """Round, phase and every peer's last verdict, from the node that runs here.

    With --watch a picture on a terminal, and elsewhere a line for every change.  It stays when the
    node ends, and goes on when it is started again.
    """
    from lightyear_node.observe.admin import ask

    state_dir = state_dir_of(home)
    if watch:
        from lightyear_node.cli.follow import follow

        follow(state_dir, format, interval)
        return
    answer = ask(state_dir, "status")
    show(format, answer, lambda: _print_status(answer))


@app.command(epilog=examples("lightyear-node health", "lightyear-node health --format json"))
def health(home: HomeOption = Path(), format: FormatOption = Format.TABLE) -> None:
    """Exit 0 if the node that runs here is ready, 3 if it is not; says why."""
    from lightyear_node.observe.admin import ask

    problems = ask(state_dir_of(home), "health")
    data = {"ready": not problems, "problems": problems}
    show(format, data, lambda: _print_health(problems))
    if problems:
        raise typer.Exit(EXIT_UNHEALTHY)


def _print_health(problems: Sequence[str]) -> None:
    for problem in problems:
        typer.echo(problem, err=True)
    if not problems:
        typer.echo("ready")


def _print_status(answer: Status) -> None:
    out = console()
    for part in picture(answer):
        out.print(part)
