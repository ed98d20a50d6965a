"""The `lightyear-node` commands that a page tells people to type."""

from __future__ import annotations

import re
import shlex

PROGRAM = "lightyear-node"


def commands_in(markdown: str) -> list[list[str]]:
    """Their arguments: of code blocks line by line, and of code spans in the text."""
    blocks = re.findall(r"```\w*\n(.*?)```", markdown, re.DOTALL)
    lines = [line.split(" #")[0] for block in blocks for line in block.splitlines()]
    text = re.sub(r"```.*?```", "", markdown, flags=re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    # In `systemctl status lightyear-node` it is a name, and no command.
    told = [code.strip() for code in (*lines, *spans) if code.strip().startswith(f"{PROGRAM} ")]
    return [shlex.split(code)[1:] for code in told]


def only_reads(markdown: str) -> list[list[str]]:
    """What stands under "See more"."""
    section = re.search(r"## See more\n(.*?)(?=\n## )", markdown, re.DOTALL)
    return commands_in(section[1]) if section else []
