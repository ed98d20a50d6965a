"""`model`: what a node has learned, as a file for people; a node may run or not."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lightyear_node.cli import model_app
from lightyear_node.cli.common import (
    Format,
    FormatOption,
    HomeOption,
    console,
    examples,
    show,
    state_dir_of,
)
from lightyear_node.export import Which


@model_app.command(
    "export",
    epilog=examples(
        "lightyear-node model export -o ward.safetensors",
        "lightyear-node model export --round best -o best.safetensors --force",
    ),
)
def export(
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="The .safetensors file to write; a card (.md and .json) goes beside it.",
        ),
    ],
    round: Annotated[
        str,
        typer.Option("--round", help="best (by our own validation), last, or a round's number."),
    ] = "last",
    which: Annotated[
        Which | None,
        typer.Option(
            help="The shared model, or the site's personal one; by default the personal one where"
            " the rule keeps one."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    home: HomeOption = Path(),
    format: FormatOption = Format.TABLE,
) -> None:
    """Write a round's model as safetensors, with a card that says where it comes from."""
    from lightyear_node.config.site import NODE_FILE, load_site
    from lightyear_node.export.taking import take

    site = load_site(home / NODE_FILE, os.environ)
    taken = take(
        home / site.state_dir,
        round,
        output,
        which=which,
        force=force,
        settings={"task": site.task.entry, "args": site.task.args},
    )
    for warning in taken.warnings:
        typer.echo(f"note: {warning}", err=True)
    files = [str(path) for path in taken.files]
    data = {"files": files, **taken.card["file"], **taken.card["model"]}
    show(format, data, lambda: _print_export(data))


def _print_export(data: Mapping[str, Any]) -> None:
    model, *card = data["files"]
    typer.echo(f"{model}: the {data['which']} model of round {data['round']}")
    typer.echo(f"  in the record  {data['digest']}")
    typer.echo(f"  sha256sum      {data['sha256']}")
    typer.echo(f"  card           {', '.join(card)}: fill in what it leaves open")


@model_app.command("list", epilog=examples("lightyear-node model list"))
def list_models(home: HomeOption = Path(), format: FormatOption = Format.TABLE) -> None:
    """The models that are there, by round, with what was measured of them."""
    from lightyear_node.export.kept import read_record

    record = read_record(state_dir_of(home))
    rows: list[dict[str, Any]] = [
        {
            "round": number,
            "digest": kept.digest,
            "bytes": kept.size,
            "names": kept.names(),
            "before": kept.entry.sealed.get("metrics", {}),
            "after": kept.entry.committed.get("metrics", {}),
        }
        for number, kept in record.completed().items()
        if kept.model is not None
    ]
    show(format, rows, lambda: _print_models(rows), rows=rows)


def _print_models(rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.table import Table

    from lightyear_node.cli.rounds import change_of

    table = Table("round", "model", "bytes", "", "before → after merging", box=None)
    for row in rows:
        names = ", ".join(row["names"])
        cells = (str(row["round"]), row["digest"][:12], str(row["bytes"]), names)
        table.add_row(*cells, change_of(row))
    console().print(table)
