"""The progress of a simulation: on a terminal, without colour, on a dumb terminal, in a pipe."""

from __future__ import annotations

import io
import re
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from lightyear_node.lab import progress_bar
from lightyear_node.lab.progress_bar import progress_bar_shown
from tests.support.terminal import COMMAND, DEADLINE_S, Terminal, environment

pytest.importorskip("sklearn")

COLOUR = r"\x1b\[[\d;]*\b(3[0-9]|9[0-7])(;[\d;]*)?m"
SIMULATE = (
    *("simulate", "--clients", "3", "--rounds", "4"),
    *("--arg", "epochs=1", "--arg", "batch_size=64"),
)


def test_a_terminal_gets_a_coloured_bar_with_rate_and_time_left(tmp_path: Path) -> None:
    with Terminal(*SIMULATE, cwd=tmp_path) as terminal:
        terminal.wait_for("simulating 3 sites for 4 rounds", " of 12, ", "about", "left")
        assert terminal.exit_code() == 0
        assert "mean, honest" in terminal.text
        assert re.search(COLOUR, terminal.raw)


def test_no_color_dumb_terminals_and_pipes_get_plain_text(tmp_path: Path) -> None:
    with Terminal(*SIMULATE, cwd=tmp_path, NO_COLOR="1") as terminal:
        assert terminal.exit_code() == 0
        assert " of 12" in terminal.text
        assert not re.search(COLOUR, terminal.raw)
    with Terminal(*SIMULATE, cwd=tmp_path, TERM="dumb") as terminal:
        assert terminal.exit_code() == 0
        assert "simulating 3 sites for 4 rounds …" in terminal.text
        assert "\x1b" not in terminal.raw
    piped = subprocess.run(
        [*COMMAND, *SIMULATE, "--format", "jsonl"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert "simulating 3 sites for 4 rounds …" in piped.stderr
    assert "\x1b" not in piped.stdout + piped.stderr
    assert len(piped.stdout.splitlines()) == 1


def test_a_file_gets_a_line_for_each_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "LINE_INTERVAL_S", 0.0)
    console = Console(file=io.StringIO(), width=100)
    with progress_bar_shown(console, "comparing") as count:
        for done in range(1, 1001):
            count(done, 1000)
    assert isinstance(console.file, io.StringIO)
    first, *lines = console.file.getvalue().splitlines()
    assert first == "comparing …"
    assert len(lines) == 10
    assert lines[4].startswith("500 of 1000, ")
    assert lines[4].endswith(" left")
