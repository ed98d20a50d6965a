"""`score`: judge a checkpoint as the node would, whether or not it runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from lightyear_node.cli import EXIT_UNHEALTHY, app
from lightyear_node.cli.common import (
    Format,
    FormatOption,
    HomeOption,
    PeersOption,
    console,
    examples,
    load_site,
    show,
)
from lightyear_node.cli.status_view import FATES


@app.command(
    epilog=examples(
        "lightyear-node score candidate.safetensors",
        "lightyear-node score candidate.safetensors --reference best --device cpu",
    )
)
def score(
    file: Annotated[Path, typer.Argument(help="Checkpoint in safetensors format.")],
    home: HomeOption = Path(),
    peers: PeersOption = Path("peers.yaml"),
    reference: Annotated[
        str,
        typer.Option(
            help="What to compare with: trained (our model after the newest round's training, as"
            " the node does), best, last, or a .safetensors file."
        ),
    ] = "trained",
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Judge a checkpoint on this site's validation data, as the node judges its peers.

    Exits with 0 if it would be accepted, with 3 if not, with 1 if it cannot be read.  Changes
    nothing and does not disturb a running node.
    """
    import asyncio

    from rich.console import Console

    from lightyear_node.tools.score_checkpoint import check_readable
    from lightyear_node.tools.score_checkpoint import score as judge

    check_readable(file)
    settings = load_site(home, peers, {"device": device} if device is not None else {})
    messages = Console(stderr=True)
    with messages.status("") as status:

        def report(text: str) -> None:
            # A spinner on a terminal, a line elsewhere.
            status.update(f"{text} …")
            if not messages.is_terminal:
                typer.echo(f"{text} …", err=True)

        data = asyncio.run(judge(settings, file, reference, report))
    show(format, data, lambda: _print(data))
    if not data["accepted"]:
        raise typer.Exit(EXIT_UNHEALTHY)


def _print(data: Mapping[str, Any]) -> None:
    from rich.text import Text

    from lightyear_node.cli.rounds import line, number, print_guard, title

    out = console()
    mark, colour = FATES["accepted" if data["accepted"] else "rejected"]
    title(out, data["file"], f"(as in round {data['round']}, rule {data['rule']})")
    out.print(Text(f"  {mark} ({data['reason']})", style=colour))
    line(out, "why", data["about"])
    if data["detail"]:
        line(out, "in detail", data["detail"])
    line(out, "what to do", data["advice"])
    line(out, "score", number(data["score"]) or "none: it was not measured")
    line(out, "threshold", number(data["threshold"]) or "none")
    print_guard(out, data["guard"])
    compared = data["reference"]
    line(out, "reference", f"{compared['which']} {(compared['digest'] or '')[:12]}".strip())
    if data["beside"]:
        line(out, "beside", f"judged together with the updates of {', '.join(data['beside'])}")
    whose = "" if data["weight"] is None else f", the update of {data['peer']}"
    line(out, "digest", f"{data['digest']}{whose}")
