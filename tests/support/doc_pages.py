"""Reads marked code blocks from the documentation, so that tests run them verbatim."""

from __future__ import annotations

import re

from tests.support.paths import ROOT


def block(page: str, mark: str) -> str:
    """Return the code block that follows the comment `mark` in a page."""
    found = re.search(rf"<!-- {mark} -->\n```\w+\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert found is not None, f"{page} has no {mark}"
    return found[1]
