"""The tree of commands that typer has built."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import typer

from lightyear_node.cli import NAME, app, load_commands

load_commands()
ROOT: Any = typer.main.get_command(app)


def walk(group: Any = ROOT, above: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield every command without subcommands, with its full name."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from walk(command, (*above, name))
        else:
            yield " ".join((*above, name)), command


COMMANDS = dict(walk())


def options_of(command: Any) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts}


def examples_of(command: Any) -> list[str]:
    found = (command.epilog or "").partition("Examples:\n")[2].partition("\n\n")[0]
    return [line.strip() for line in found.splitlines()]


def parse(line: str) -> str:
    """Parse a command line without running it; return the name of its command."""
    program, *words = shlex.split(re.sub(r" >+ \S+$", "", line))
    assert program == NAME
    group, above = ROOT, []
    while hasattr(group, "commands"):
        assert words[:1], f"{line}: which command?"
        assert words[0] in group.commands, f"{line}: no such command"
        above.append(words[0])
        group, words = group.commands[words[0]], words[1:]
    group.make_context(above[-1], words)
    return " ".join(above)
