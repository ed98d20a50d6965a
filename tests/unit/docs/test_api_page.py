"""docs/api.md documents every public name, and its examples run and print what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lightyear_node
from tests.support.paths import DOCS, ROOT

pytest.importorskip("sklearn")  # the digits

PAGE = (DOCS / "api.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
EXAMPLES = [block for block in BLOCKS if not re.match(r"# \w+\.py\n", block)]


def expected_output(example: str) -> list[str]:
    """The comments behind `print(...)`, or on the line below it."""
    return re.findall(r"^ *print\(.*\)(?:  |\n)# (.*)$", example, re.MULTILINE)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's files, where Python finds them."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(ROOT)  # for published results
    for block in BLOCKS:
        if named := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / named[1]).write_text(block)


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_example_runs_and_prints_what_its_comments_say(
    example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(example, "docs/api.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line in expected_output(example)] == expected_output(example)


def test_the_examples_use_and_the_table_lists_every_public_name() -> None:
    imported = {
        name.strip()
        for names in re.findall(r"^from lightyear_node import (.*)$", PAGE, re.MULTILINE)
        for name in names.split(",")
    }
    assert imported == set(lightyear_node.__all__) - {"__version__"}
    table = PAGE.split("\n## ")[0]
    assert all(f"`{name}`" in table for name in lightyear_node.__all__)
    assert any(expected_output(example) for example in EXAMPLES)
