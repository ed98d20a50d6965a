"""Runs promtool, from Debian's package `prometheus`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml

from tests.support.needs import need_tool
from tests.support.paths import ROOT

DEPLOY = ROOT / "deploy"
RECORDING = DEPLOY / "prometheus" / "recording.rules.yml"
ALERTS = DEPLOY / "prometheus" / "alerts.rules.yml"


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    need_tool("promtool")
    return subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60
    )


def check_expressions(expressions: dict[str, str], folder: Path) -> None:
    """Check that every expression is valid; errors name the expression."""
    rules = [
        {"record": f"expression_{number}", "expr": text, "labels": {"shown_in": name}}
        for number, (name, text) in enumerate(expressions.items())
    ]
    file = folder / "expressions.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}, width=1000))
    ended = promtool("check", "rules", file)
    assert ended.returncode == 0, ended.stderr
