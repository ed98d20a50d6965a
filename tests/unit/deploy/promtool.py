"""Prometheus' own checker, from Debian's package `prometheus`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import yaml

from tests.federation.needs import need

DEPLOY = Path(__file__).parents[3] / "deploy"
RECORDING = DEPLOY / "prometheus" / "recording.rules.yml"
ALERTS = DEPLOY / "prometheus" / "alerts.rules.yml"
DOCS = DEPLOY.parent / "docs"


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    found = shutil.which("promtool")
    need(None if found else "promtool is missing: install Debian's package prometheus")
    return subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60
    )


def check_expressions(expressions: dict[str, str], folder: Path) -> None:
    """Whether Prometheus can read each of them; they are told by their names."""
    rules = [
        {"record": f"expression_{number}", "expr": text, "labels": {"shown_in": name}}
        for number, (name, text) in enumerate(expressions.items())
    ]
    file = folder / "expressions.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}, width=1000))
    ended = promtool("check", "rules", file)
    assert ended.returncode == 0, ended.stderr
