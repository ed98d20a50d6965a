"""Options that several commands share, and how what they found is printed.

Data goes to standard output: for people, as one JSON document in an envelope, or as JSON lines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightyear_node.cli.complete import peer_names

if TYPE_CHECKING:
    from rich.console import Console

    from lightyear_node.errors import LightyearError

SCHEMA_VERSION = "1"
WIDTH = 160
"""Of tables that are not printed to a terminal."""


class Format(StrEnum):
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
PeerArgument = Annotated[
    str, typer.Argument(help="The site's name in peers.yaml.", autocompletion=peer_names)
]
FormatOption = Annotated[
    Format,
    typer.Option("--format", help="For people, as one JSON document, or an object a line."),
]


def examples(*lines: str) -> str:
    """What a command's help ends with; each is tried by a test."""
    return "\n".join(("Examples:", *(f"  {line}" for line in lines)))


def show(
    format: Format,
    data: Any,
    for_people: Callable[[], None],
    *,
    rows: Iterable[Any] | None = None,
) -> None:
    """Print what was found; `rows` are the lines of jsonl, where it is more than one."""
    if format is Format.JSON:
        print_json(data)
    elif format is Format.JSONL:
        print_lines([data] if rows is None else rows)
    else:
        for_people()


def print_lines(rows: Iterable[Any]) -> None:
    """Without the envelope: each line is for itself."""
    for row in rows:
        typer.echo(json.dumps(row))


def print_json(data: Any) -> None:
    """Control characters and lone surrogates never reach the terminal: JSON escapes them."""
    typer.echo(json.dumps({"schema_version": SCHEMA_VERSION, "status": "ok", "data": data}))


def print_error(message: str, hint: str | None, exit_code: int) -> None:
    """For programs, which read standard output; people have it in words on standard error."""
    about = {"message": message, "hint": hint, "exit_code": exit_code}
    typer.echo(json.dumps({"schema_version": SCHEMA_VERSION, "status": "error", **about}))


def asked_format(arguments: Sequence[str]) -> Format:
    """Also of arguments that cannot be parsed, since somebody reads the error, too."""
    found = Format.TABLE
    for word, following in pairwise([*arguments, ""]):
        name, equals, value = word.partition("=")
        value = value if equals else following
        if name == "--format" and value in list(Format):
            found = Format(value)
    return found


def console() -> Console:
    """For tables on standard output: a file or a program gets whole lines."""
    import sys

    from rich.console import Console

    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else WIDTH, highlight=False)


def state_dir_of(home: Path) -> Path:
    from lightyear_node.config.site import NODE_FILE, load_site

    return home / load_site(home / NODE_FILE, os.environ).state_dir


def running(home: Path) -> dict[str, Any] | None:
    """What the node that runs in this folder says of itself; None if there is none."""
    from lightyear_node.config.site import NODE_FILE
    from lightyear_node.observe.admin import NotRunning, ask

    if not (home / NODE_FILE).exists():
        return None
    try:
        return dict(ask(state_dir_of(home), "status"))
    except NotRunning:
        return None


def unknown_peer(where: str, name: str, known: Iterable[str]) -> LightyearError:
    """A name that is not there, with the one that was probably meant."""
    import difflib

    from lightyear_node.errors import ConfigError

    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    guess = f"did you mean {near[0]}? " if near else ""
    hint = f"{guess}it has {', '.join(names) or 'nobody'}"
    return ConfigError(f"{where} has no peer `{name}`", hint=hint)
