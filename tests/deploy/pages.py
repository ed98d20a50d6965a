"""What our pages say is typed as they say it."""

from __future__ import annotations

import re

from engine import ROOT


def block(page: str, mark: str) -> str:
    """The block of a page that follows a mark."""
    found = re.search(rf"<!-- {mark} -->\n```\w+\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert found is not None, f"{page} has no {mark}"
    return found[1]
