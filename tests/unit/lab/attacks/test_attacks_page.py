"""docs/attacks.md: its command runs as written, and its table is that of the code."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

from lightyear_node.lab.malfunction_plugins import load_plugin
from lightyear_node.lab.malfunctions import ATTACKS
from tests.support import page_package
from tests.support.page_package import documented_commands, run
from tests.support.paths import DOCS
from tests.support.recorded_attacks import named

PAGE = DOCS / "attacks.md"


def rows() -> dict[str, list[str]]:
    lines = re.findall(r"^\| `([\w-]+)` \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in lines}


def test_the_table_lists_every_attack_in_order() -> None:
    assert list(rows()) == list(ATTACKS)


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_table_lists_every_option_with_its_default(attack: str) -> None:
    _, cell, _ = rows()[attack]
    parameters = list(inspect.signature(load_plugin(named(attack)).function).parameters.values())
    for option in parameters[2:]:
        number = isinstance(option.default, int | float)
        assert (f"`{option.name}` {option.default:g}" if number else f"`{option.name}`") in cell
    words = set(re.findall(r"`([\w-]+)`", cell)) - {"std", "sign", "unit"}
    assert words == {option.name for option in parameters[2:]}


def test_the_documented_command_runs_as_written(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    [command] = documented_commands(PAGE)
    words = (*command, "--rounds", "1", "--arg=epochs=1", "--format", "json")
    answer = run(*words, cwd=tmp_path, environment=page_package.environment(tmp_path))
    expected = {"kind": "alie", "scale": None, "options": {"z": 1.5}}
    assert list(json.loads(answer)["data"]["malfunctions"].values()) == [expected] * 2
