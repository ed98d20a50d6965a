"""Runs the commands of the README's tour exactly as written."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.needs import need_tool
from tests.support.paths import ROOT
from tests.support.site_queries import DEADLINE_S

README = ROOT / "README.md"


def blocks(kind: str) -> list[str]:
    """The code blocks of the README that are marked `<!-- tour: KIND -->`."""
    found = re.findall(rf"<!-- tour: {kind} -->\n```bash\n(.*?)```", README.read_text(), re.DOTALL)
    assert found, f"the README has no block marked `tour: {kind}`"
    return found


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment in which `lightyear-node` runs this checkout, as after `activate`."""
    tools = tmp_path / "bin"
    tools.mkdir()
    command = tools / "lightyear-node"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lightyear_node "$@"\n')
    command.chmod(0o755)
    root = str(README.parent)
    return {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        "LIGHTYEAR_WORKER_THREADS": "1",
    }


@contextlib.contextmanager
def running(lines: list[str], cwd: Path, environment: dict[str, str]) -> Iterator[None]:
    terminals = [
        subprocess.Popen(
            ["bash", "-c", f"exec {line}"],
            cwd=cwd,
            env=environment,
            stderr=(cwd / f"terminal-{number}.log").open("wb"),
        )
        for number, line in enumerate(lines)
    ]
    try:
        yield
    finally:
        for terminal in terminals:
            terminal.send_signal(signal.SIGINT)
        codes = [terminal.wait(30) for terminal in terminals]
    assert codes == [0] * len(codes)


def run(script: str, cwd: Path, environment: dict[str, str]) -> str:
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, f"{script}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


def test_the_tour_works_as_written(tmp_path: Path, shell: dict[str, str]) -> None:
    need_tool("bash", "curl")
    for script in blocks("setup"):
        run(script, tmp_path, shell)
    [start] = blocks("start")
    [look] = blocks("look")
    with running(start.strip().splitlines(), tmp_path, shell):
        deadline = time.monotonic() + DEADLINE_S
        finished = False
        while not finished and time.monotonic() < deadline:
            time.sleep(0.5)
            status = subprocess.run(
                ["lightyear-node", "status", "--home", "site-a", "--format", "json"],
                cwd=tmp_path,
                env=shell,
                capture_output=True,
                text=True,
                check=False,
            )
            finished = status.returncode == 0 and json.loads(status.stdout)["data"]["finished"]
        log = (tmp_path / "terminal-0.log").read_text()
        assert finished, log
        inspected = run(look, tmp_path, shell)
        [ask] = blocks("ask")
        audited = run(ask, tmp_path, shell)
        [take] = blocks("take")
        scored = run(take, tmp_path, shell)
    assert (tmp_path / "model.safetensors").stat().st_size > 0
    assert "accepted" in scored
    assert "site-c" in audited
    assert "site-a in tour" in inspected
    assert "✓ accepted" in inspected
    assert "ready" in inspected
    assert re.search(r"✓ site-b( +✓){12}", inspected), inspected
    assert 'peer_verdicts_total{peer="site-b",reason="ok",verdict="accepted"}' in inspected
    # The log names the peers that the node waited for.
    assert "waiting for site-" in log or "all 2 peers delivered" in log
