"""Five hundred strangers at once neither end a node nor fill its memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightyear_node.lab.federation import package_environment
from lightyear_node.transport.server import ExchangeServer
from lightyear_node.transport.service import Service

from .sites import A, B, C, FakeHost, pins

GROWTH_MIB_MAX = 48


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_crowd_that_says_nothing_is_survived() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.crowd"],
        cwd=Path(__file__).parents[2],
        env=package_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < GROWTH_MIB_MAX


def test_handshakes_are_told_only_what_is_new(tmp_path: Path) -> None:
    host = FakeHost()
    server = ExchangeServer(A, pins(B), Service(host, tmp_path), host)
    assert server._knocked() is not None
    assert server._knocked() is None
    server.admit(A, pins(B, C))
    assert server._knocked() is not None
    assert server._knocked() is None
