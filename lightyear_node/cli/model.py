"""`model`: list and export trained models, whether or not the node runs."""

from __future__ import annotations

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
    node_config,
    show,
    state_dir_of,
)
from lightyear_node.tools.model_export import ModelKind


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
            help="The .safetensors file to write, with a model card (.md and .json) beside it.",
        ),
    ],
    round: Annotated[
        str,
        typer.Option("--round", help="best (by this site's validation), last, or a round number."),
    ] = "last",
    which: Annotated[
        ModelKind | None,
        typer.Option(
            help="The shared model, the site's personal one, or the one trained alone; by default"
            " the one that the site uses."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    home: HomeOption = Path(),
    format: FormatOption = Format.TABLE,
) -> None:
    """Write a round's model as safetensors, with a model card that states its origin."""
    from lightyear_node.tools.model_export.export_file import export_model

    site = node_config(home)
    exported = export_model(
        home / site.state_dir,
        round,
        output,
        which=which,
        force=force,
        settings={"task": site.task.name, "args": site.task.args},
    )
    for warning in exported.warnings:
        typer.echo(f"note: {warning}", err=True)
    files = [str(path) for path in exported.files]
    data = {"files": files, **exported.card["file"], **exported.card["model"]}
    show(format, data, lambda: _print_export(data))


def _print_export(data: Mapping[str, Any]) -> None:
    model, *card = data["files"]
    typer.echo(f"{model}: the {data['which']} model of round {data['round']}")
    typer.echo(f"  in the record  {data['digest']}")
    typer.echo(f"  sha256sum      {data['sha256']}")
    typer.echo(f"  card           {', '.join(card)}: fill in what it leaves open")


@model_app.command("list", epilog=examples("lightyear-node model list"))
def list_models(home: HomeOption = Path(), format: FormatOption = Format.TABLE) -> None:
    """List the stored models by round, with their metrics."""
    from lightyear_node.tools.model_export.stored_models import read_record

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
