"""`status` and `health`: what a running node is doing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

from lightyear_node.cli import app
from lightyear_node.cli.common import Format, FormatOption, HomeOption, print_json, state_dir_of

_MARKS = {"accepted": "✓ accepted", "rejected": "✗ rejected", "missing": "– missing"}


@app.command()
def status(home: HomeOption = Path(), format: FormatOption = Format.TABLE) -> None:
    """Round, phase and every peer's last verdict, from the node that runs here."""
    from lightyear_node.observe.admin import ask

    answer = ask(state_dir_of(home), "status")
    if format is Format.JSON:
        print_json(answer)
    else:
        _print_status(answer)


@app.command()
def health(home: HomeOption = Path()) -> None:
    """Exit 0 if the node that runs here is ready, 3 if it is not; says why."""
    from lightyear_node.observe.admin import ask

    problems = ask(state_dir_of(home), "health")
    for problem in problems:
        typer.echo(problem, err=True)
    if problems:
        raise typer.Exit(3)
    typer.echo("ready")


def _print_status(answer: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout)
    console.print(
        f"[bold]{answer['name']}[/] in [bold]{answer['federation']}[/]:"
        f" round {min(answer['round'] + 1, answer['rounds'])} of {answer['rounds']},"
        f" {answer['phase']}",
        highlight=False,
    )
    console.print(Text(answer["waiting"]))
    for mark in ("blocked", "quarantined"):
        if answer[mark]:
            console.print(Text(f"{mark}: {', '.join(answer[mark])}", style="red"))
    if answer["disk"]["problem"]:
        console.print(Text(f"NOT READY: {answer['disk']['problem']}", style="red"))
    table = Table("peer", "state", "round", "verdict", "reason", "agreement", box=None)
    colours = {"accepted": "green", "rejected": "red", "missing": "yellow"}
    for peer in answer["peers"]:
        verdict = peer["verdict"]
        table.add_row(
            peer["name"],
            Text(_state(peer)),
            "" if peer["round"] is None else str(peer["round"]),
            Text(_MARKS.get(verdict, ""), style=colours.get(verdict, "")),
            peer["reason"] or "",
            "" if peer["agreement"] is None else f"{peer['agreement']:.3f}",
        )
    console.print(table)
    if answer["harm"] and answer["harm"]["dropped"]:
        from lightyear_node.records import Harm

        harm = Harm.from_plain(answer["harm"])
        console.print(Text(f"last round: {harm.in_words()}", "yellow"))
    moved = answer["bytes"]
    console.print(
        f"received {_mib(moved['wire'])} for {_mib(moved['raw'])} of weights,"
        f" sent {_mib(moved['wire_sent'])};"
        f" our certificate ends on {answer['certificate_expires'][:10]}",
        highlight=False,
    )


def _state(peer: dict[str, Any]) -> str:
    words = [peer["state"] + (f": {peer['about']}" if peer["about"] else "")]
    words += [f"left out {peer['left_out']} times"] if peer["left_out"] else []
    words += [peer["differs"]] if peer["differs"] else []
    words += [f"of ours it says: {peer['opinion']}"] if peer["opinion"] else []
    return "; ".join(words)


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
