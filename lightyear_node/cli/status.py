"""`status` and `health` of a running node.

`status_view` renders one status; `status_polling` repeats it for `--watch`.
"""

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
from lightyear_node.cli.status_view import Status, render_status

DEGRADED = ("unreachable", "one-way", "refused", "quarantined")
"""States of peers whose updates are missing from rounds, or may be."""


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
        bool, typer.Option("--watch", "-w", help="Keep showing changes, until q or Ctrl-C.")
    ] = False,
    interval: Annotated[
        float, typer.Option(help="Seconds between two queries of --watch.", min=0.1, max=3600)
    ] = 1.0,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show the round, the phase and every peer's last verdict of the running node.

    With --watch: a live view on a terminal, elsewhere a line for every change.  It keeps running
    while the node is stopped and restarted.
    """
    from lightyear_node.observe.admin_socket import ask

    state_dir = state_dir_of(home)
    if watch:
        from lightyear_node.cli.status_polling import watch_status

        watch_status(state_dir, format, interval)
        return
    answer = ask(state_dir, "status")
    show(format, answer, lambda: _print_status(answer))


@app.command(epilog=examples("lightyear-node health", "lightyear-node health --format json"))
def health(home: HomeOption = Path(), format: FormatOption = Format.TABLE) -> None:
    """Exit with 0 if the node is ready, with 3 if not; print the reasons.

    A node can be ready while peers are unreachable, refused or quarantined; these are listed.
    """
    from lightyear_node.observe.admin_socket import ask

    answer = ask(state_dir_of(home), "status")
    problems, degraded = answer["problems"], _degraded(answer)
    data = {"ready": not problems, "problems": problems, "degraded": degraded}
    show(format, data, lambda: _print_health(problems, degraded))
    if problems:
        raise typer.Exit(EXIT_UNHEALTHY)


def _degraded(status: Status) -> list[dict[str, str]]:
    """Return the peers in one of the DEGRADED states, with the reason."""
    quarantined = status.get("quarantined", ())
    found = []
    for peer in status["peers"]:
        if peer["name"] in quarantined:
            state, about = "quarantined", "it signed two updates of one round"
        else:
            state, about = peer["state"], peer["about"]
        if state in DEGRADED:
            found.append({"peer": peer["name"], "state": state, "about": about})
    return found


def _print_health(problems: Sequence[str], degraded: Sequence[dict[str, str]]) -> None:
    from lightyear_node.observe.progress import peer_state_text

    for problem in problems:
        typer.echo(problem, err=True)
    if not problems:
        typer.echo("ready, but degraded:" if degraded else "ready")
    for peer in degraded:
        typer.echo(f"  {peer['peer']}: {peer_state_text(peer['state'], peer['about'])}")


def _print_status(answer: Status) -> None:
    out = console()
    for part in render_status(answer):
        out.print(part)
