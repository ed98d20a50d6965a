"""docs/invariants.md: every test, file and folder that it names exists."""

from __future__ import annotations

import re

from tests.support.paths import DOCS, ROOT

PAGE = DOCS / "invariants.md"


def named_in_code() -> set[str]:
    """The names of all tests and test files, as the page writes them."""
    files = [file for file in (ROOT / "tests").rglob("*.py") if "__pycache__" not in file.parts]
    defined = r"^\s*(?:async )?(?:def (test_\w+)|class (Test\w+))"
    names = {file.name for file in files}
    for file in files:
        for function, group in re.findall(defined, file.read_text(), re.MULTILINE):
            names |= {function, group}
    return names


def test_every_test_named_on_the_page_exists() -> None:
    named = re.findall(r"`((?:test_|Test)[\w.]+)`", PAGE.read_text())
    assert len(named) > 80
    unknown = sorted(set(named) - named_in_code())
    assert not unknown, unknown


def test_every_path_named_on_the_page_exists() -> None:
    paths = re.findall(r"`(tests/[\w/.]+)`", PAGE.read_text())
    assert len(paths) > 30
    assert not [path for path in paths if not (ROOT / path).exists()]
