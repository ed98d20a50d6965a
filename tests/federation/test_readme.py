"""The README's tour, run exactly as it is written."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from asking import DEADLINE_S

README = Path(__file__).parents[2] / "README.md"


def blocks(kind: str) -> list[str]:
    found = re.findall(rf"<!-- tour: {kind} -->\n```bash\n(.*?)```", README.read_text(), re.DOTALL)
    assert found, f"the README has no block of the tour's {kind}"
    return found


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment in which `lightyear-node` is this checkout's, as after `activate`."""
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
    for script in blocks("setup"):
        run(script, tmp_path, shell)
    [start] = blocks("start")
    [look] = blocks("look")
    if shutil.which("curl") is None:
        look = "\n".join(line for line in look.splitlines() if not line.startswith("curl"))
    with running(start.strip().splitlines(), tmp_path, shell):
        deadline = time.monotonic() + DEADLINE_S
        finished = False
        while not finished and time.monotonic() < deadline:
            time.sleep(0.5)
            asked = subprocess.run(
                ["lightyear-node", "status", "--home", "site-a", "--format", "json"],
                cwd=tmp_path,
                env=shell,
                capture_output=True,
                text=True,
                check=False,
            )
            finished = asked.returncode == 0 and json.loads(asked.stdout)["data"]["finished"]
        log = (tmp_path / "terminal-0.log").read_text()
        assert finished, log
        shown = run(look, tmp_path, shell)
        [ask] = blocks("ask")
        told = run(ask, tmp_path, shell)
        [take] = blocks("take")
        taken = run(take, tmp_path, shell)
    assert (tmp_path / "model.safetensors").stat().st_size > 0
    assert "accepted" in taken
    assert "site-c" in told
    assert "site-a in tour" in shown
    assert "✓ accepted" in shown
    assert "ready" in shown
    assert re.search(r"✓ site-b( +✓){12}", shown), shown
    assert 'peer_verdicts_total{peer="site-b",reason="ok",verdict="accepted"}' in shown
    # It has said whom it was waiting for, in words.
    assert "waiting for site-" in log or "all 2 peers delivered" in log
