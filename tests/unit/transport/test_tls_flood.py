"""500 unauthenticated connections at once neither crash a node nor fill its memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightyear_node.lab.federation import package_environment
from lightyear_node.transport.handlers import Handlers
from lightyear_node.transport.server import ExchangeServer
from tests.support.paths import ROOT
from tests.support.tls_sites import A, B, C, FakeHost, pins

GROWTH_MIB_MAX = 48


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_flood_of_silent_connections_takes_bounded_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.tls_flood"],
        cwd=ROOT,
        env=package_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < GROWTH_MIB_MAX


def test_grpc_gets_credentials_only_when_they_have_changed(tmp_path: Path) -> None:
    host = FakeHost()
    server = ExchangeServer(A, pins(B), Handlers(host, tmp_path), host)
    assert server.handshake_started() is not None
    assert server.handshake_started() is None
    server.set_credentials(A, pins(B, C))
    assert server.handshake_started() is not None
    assert server.handshake_started() is None
