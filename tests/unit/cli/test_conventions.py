"""Rules for all commands: examples, formats, the page that lists them, fast imports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightyear_node.cli import EXIT_CODES
from tests.support.command_tree import COMMANDS, ROOT, examples_of, options_of, parse
from tests.support.journals import a_federation
from tests.support.paths import DOCS
from tests.support.terminal import DEADLINE_S, environment
from tests.unit.cli.test_commands import run

DESIGNED = (
    *("demo", "init", "id", "check", "start", "status", "health", "explain"),
    *(f"peers {name}" for name in ("list", "show", "add", "remove", "block", "unblock", "ping")),
    *("rounds list", "rounds show", "audit verify", "audit export"),
    *("simulate", "experiment", "report"),
)
WRITES_FILES = {"start", "audit export"}
"""Commands with output formats of their own."""
PAGE = DOCS / "commands.md"


# Help.


def test_every_command_of_the_design_exists() -> None:
    assert set(DESIGNED) <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_that_parse(name: str) -> None:
    examples = examples_of(COMMANDS[name])
    assert examples
    assert {parse(example) for example in examples} == {name}


def test_the_top_level_has_examples_and_exit_codes(tmp_path: Path) -> None:
    assert all(parse(example) in COMMANDS for example in examples_of(ROOT))
    shown = run("--help", cwd=tmp_path).stdout
    for code, about in EXIT_CODES.items():
        assert re.search(rf"\b{code}  {re.escape(about)}", shown), code


def test_the_page_lists_every_command_and_exit_code() -> None:
    page = PAGE.read_text()
    for name, command in COMMANDS.items():
        assert f"`lightyear-node {name}" in page or f"\nlightyear-node {name}" in page, name
        assert command.help, name
    for code, about in EXIT_CODES.items():
        assert f"| {code} | {about}" in page
    for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            example = line.partition("  #")[0].strip()
            if not example.endswith("-completion"):
                assert parse(example) in COMMANDS


def test_every_command_that_prints_data_has_all_formats() -> None:
    for name in COMMANDS.keys() - WRITES_FILES:
        assert "--format" in options_of(COMMANDS[name]), name


# Import time.

LIGHT = (
    *(["--help"], ["status"], ["health"], ["pause"]),
    *(["peers", "list"], ["peers", "show", "site-b"], ["peers", "block", "site-b"]),
    *(["rounds", "list"], ["explain", "--round", "1", "--peer", "site-b"]),
    *(["audit", "head"], ["audit", "verify"]),
    *([*name.split(), "--help"] for name in COMMANDS),
)


def test_fast_commands_import_no_slow_package(tmp_path: Path) -> None:
    """Interactive commands, one after the other in one process."""
    a_federation(tmp_path)
    script = f"""
import contextlib, io, sys
from lightyear_node.cli import main
for words in {list(LIGHT)!r}:
    sys.argv = ["lightyear-node", *words]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(SystemExit):
            main()
    heavy = {{"torch", "numpy", "sklearn", "matplotlib", "grpc"}} & set(sys.modules)
    assert not heavy, (words, heavy)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path / "site-a",
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S * 2,
    )
    assert ended.returncode == 0, ended.stderr
