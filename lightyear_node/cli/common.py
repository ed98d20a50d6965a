"""Options that several commands share, and the output formats.

Data goes to standard output: as text, as one JSON document in an envelope, or as JSON lines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightyear_node.cli.completion import peer_names
from lightyear_node.errors import ConfigError, LightyearError

if TYPE_CHECKING:
    from rich.console import Console

    from lightyear_node.config.node import NodeConfig
    from lightyear_node.node.home import Home

SCHEMA_VERSION = "1"
WIDTH = 160
"""Width of tables that are not printed to a terminal."""


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"


HomeOption = Annotated[
    Path,
    typer.Option(
        "--home",
        envvar="LIGHTYEAR_HOME",
        help="The node's folder, created by `init`.",
        show_default=".",
    ),
]
PeersOption = Annotated[Path, typer.Option("--peers", help="The federation's peers.yaml.")]
PeerArgument = Annotated[
    str, typer.Argument(help="The site's name in peers.yaml.", autocompletion=peer_names)
]
FormatOption = Annotated[
    Format,
    typer.Option("--format", help="Text, one JSON document, or one JSON object per line."),
]


def examples(*lines: str) -> str:
    """The end of a command's help; a test parses each example."""
    return "\n".join(("Examples:", *(f"  {line}" for line in lines)))


def show(
    format: Format,
    data: Any,
    for_people: Callable[[], None],
    *,
    rows: Iterable[Any] | None = None,
) -> None:
    """Print the result; `rows` are the lines of jsonl if there can be several."""
    # In JSON, control characters and lone surrogates are escaped.
    if format is Format.JSON:
        typer.echo(json.dumps({"schema_version": SCHEMA_VERSION, "status": "ok", "data": data}))
    elif format is Format.JSONL:
        for row in [data] if rows is None else rows:
            typer.echo(json.dumps(row))
    else:
        for_people()


def print_error(message: str, hint: str | None, exit_code: int) -> None:
    """Print an error as JSON on standard output; its text is on standard error, too."""
    about = {"message": message, "hint": hint, "exit_code": exit_code}
    typer.echo(json.dumps({"schema_version": SCHEMA_VERSION, "status": "error", **about}))


def asked_format(arguments: Sequence[str]) -> Format:
    """Return the requested format, even of arguments that cannot be parsed otherwise."""
    found = Format.TABLE
    for word, following in pairwise([*arguments, ""]):
        name, equals, value = word.partition("=")
        value = value if equals else following
        if name == "--format" and value in list(Format):
            found = Format(value)
    return found


def console() -> Console:
    """A console for tables on standard output; wide if that is not a terminal."""
    import sys

    from rich.console import Console

    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else WIDTH, highlight=False)


def node_config(home: Path) -> NodeConfig:
    """The site's own settings, from node.yaml and the environment."""
    from lightyear_node.config.node import NODE_FILE, load_node_config

    return load_node_config(home / NODE_FILE, os.environ)


def state_dir_of(home: Path) -> Path:
    return home / node_config(home).state_dir


def load_site(home: Path, peers: Path, flags: Mapping[str, Any] | None = None) -> Home:
    """All settings and keys of the site, checked; `flags` are those of the command line."""
    from datetime import UTC, datetime

    from lightyear_node.node.home import load_home

    now = datetime.now(UTC)
    return load_home(home, peers, environment=os.environ, flags=flags or {}, now=now)


def running(home: Path) -> dict[str, Any] | None:
    """Return the status of the node that runs in this folder; None if none runs."""
    from lightyear_node.config.node import NODE_FILE
    from lightyear_node.observe.admin_socket import NotRunning, ask

    if not (home / NODE_FILE).exists():
        return None
    try:
        return dict(ask(state_dir_of(home), "status"))
    except NotRunning:
        return None


def unknown_peer(where: str, name: str, known: Iterable[str]) -> LightyearError:
    """The error for an unknown name, with the nearest known one as its hint."""
    import difflib

    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    guess = f"did you mean {near[0]}? " if near else ""
    hint = f"{guess}it has {', '.join(names) or 'no peers'}"
    return ConfigError(f"{where} has no peer `{name}`", hint=hint)
