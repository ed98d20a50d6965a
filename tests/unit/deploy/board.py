"""The Grafana board as its file says it: panels, queries, and queries as Prometheus gets them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "dashboard.json"

Panel = dict[str, Any]


def load() -> dict[str, Any]:
    return dict(json.loads(BOARD.read_text()))


def panels() -> list[Panel]:
    """All that show something; rows are only headings."""
    return [panel for panel in load()["panels"] if panel["type"] != "row"]


def panel(title: str) -> Panel:
    [found] = [one for one in panels() if one["title"] == title]
    return found


def expressions() -> dict[str, str]:
    """Every query of the board, by where it stands."""
    return {
        f"{one['title']} {target['refId']}": target["expr"]
        for one in panels()
        for target in one["targets"]
    }


def filled_in(expression: str, values: Mapping[str, str]) -> str:
    """With values in place of the board's variables, as Grafana does before it asks."""
    return re.sub(r"\$(\w+)", lambda variable: values[variable[1]], expression)
