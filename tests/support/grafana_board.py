"""Reads the Grafana dashboard's file: panels, queries, and queries with variables filled in."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tests.support.paths import ROOT

BOARD = ROOT / "deploy" / "grafana" / "dashboard.json"

Panel = dict[str, Any]


def load() -> dict[str, Any]:
    return dict(json.loads(BOARD.read_text()))


def panels() -> list[Panel]:
    """Return all panels except rows, which are only headings."""
    return [panel for panel in load()["panels"] if panel["type"] != "row"]


def panel(title: str) -> Panel:
    [found] = [one for one in panels() if one["title"] == title]
    return found


def expressions() -> dict[str, str]:
    """Return every query by panel title and target."""
    return {
        f"{one['title']} {target['refId']}": target["expr"]
        for one in panels()
        for target in one["targets"]
    }


def filled_in(expression: str, values: Mapping[str, str]) -> str:
    """Replace the dashboard's variables by values, as Grafana does."""
    return re.sub(r"\$(\w+)", lambda variable: values[variable[1]], expression)
