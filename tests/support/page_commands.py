"""Extracts the `lightyear-node` commands from a documentation page."""

from __future__ import annotations

import re
import shlex

PROGRAM = "lightyear-node"


def commands_in(markdown: str) -> list[list[str]]:
    """Return the arguments of each command, from code blocks by line and from code spans."""
    blocks = re.findall(r"```\w*\n(.*?)```", markdown, re.DOTALL)
    lines = [line.split(" #")[0] for block in blocks for line in block.splitlines()]
    text = re.sub(r"```.*?```", "", markdown, flags=re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    # In `systemctl status lightyear-node` it is a unit name, not a command.
    commands = [code.strip() for code in (*lines, *spans) if code.strip().startswith(f"{PROGRAM} ")]
    return [shlex.split(code)[1:] for code in commands]


def only_reads(markdown: str) -> list[list[str]]:
    """Return the commands in the section "See more"."""
    section = re.search(r"## See more\n(.*?)(?=\n## )", markdown, re.DOTALL)
    return commands_in(section[1]) if section else []
