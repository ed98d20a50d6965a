"""Options that several commands share, and the JSON envelope around what they print."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

SCHEMA_VERSION = "1"


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"


class ListFormat(StrEnum):
    """For what may be many lines."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"


HomeOption = Annotated[
    Path,
    typer.Option(
        "--home",
        envvar="LIGHTYEAR_HOME",
        help="The node's folder, as `init` made it.",
        show_default=".",
    ),
]
PeersOption = Annotated[Path, typer.Option("--peers", help="The federation's peers.yaml.")]
FormatOption = Annotated[Format, typer.Option("--format", help="How to print the result.")]

ListFormatOption = Annotated[
    ListFormat, typer.Option("--format", help="How to print the result; jsonl is an object a line.")
]


def print_lines(rows: Iterable[Any]) -> None:
    """Without the envelope: each line is for itself."""
    for row in rows:
        typer.echo(json.dumps(row))


def print_json(data: Any) -> None:
    """Control characters and lone surrogates never reach the terminal: JSON escapes them."""
    typer.echo(json.dumps({"schema_version": SCHEMA_VERSION, "status": "ok", "data": data}))


def state_dir_of(home: Path) -> Path:
    from lightyear_node.config import NODE_FILE, load_site

    return home / load_site(home / NODE_FILE, os.environ).state_dir
