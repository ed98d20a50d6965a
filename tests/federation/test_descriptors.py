"""Connection floods and exhausted file descriptors: the node continues."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightyear_node.identity.keys import make_identity
from lightyear_node.lab.federation import START, Federation, SiteHome
from lightyear_node.storage.hash_chain import Record
from tests.federation.test_http2 import Raw, connected
from tests.support.site_queries import DEADLINE_S, A, LayOut, check_histories, metrics_of

Records = Callable[[SiteHome], list[Record]]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

FEW = 256
MANY = 1100
"""More than the usual limit of 1024 open files per process."""
NONE_LEFT, SOME_LEFT = "too many open files", "can be opened again"
CROWDED, CALM = "too many unidentified connections", "no longer too many"


def limited(files: int) -> list[str]:
    """Return the command that starts a site with this limit of open files."""
    return ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *START]


def open_files(federation: Federation) -> int:
    return len(os.listdir(f"/proc/{federation.pid(A)}/fd"))


def round_of(federation: Federation) -> int:
    status = federation.status()[A]
    assert status is not None
    return int(status["round"])


def wait_for_rounds(federation: Federation, more: int) -> None:
    reached = round_of(federation) + more
    federation.wait_until(lambda s: s[A] is not None and s[A]["round"] >= reached, DEADLINE_S)


def crowded_out(home: SiteHome) -> float:
    return metrics_of(home)["lightyear_connections_crowded_out_total"]


@contextlib.contextmanager
def running(homes: list[SiteHome], files: int) -> Iterator[Federation]:
    with Federation(homes, limited(files)) as federation:
        federation.wait_until(
            lambda s: all(one is not None and one["round"] >= 1 for one in s.values()), DEADLINE_S
        )
        yield federation


def silent(node: SiteHome) -> socket.socket:
    return connected(node)


def half_a_handshake(node: SiteHome) -> socket.socket:
    line = connected(node)
    line.sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a TLS handshake
    return line


def stranger(keys: Path) -> Callable[[SiteHome], socket.socket]:
    """Complete the handshake with an unknown certificate, then make no call."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(keys / "tls.crt", keys / "tls.key")

    def connect(node: SiteHome) -> socket.socket:
        line = connected(node)
        with contextlib.suppress(OSError):
            line = context.wrap_socket(line)
        return line

    return connect


def check_that_it_was_reported(home: SiteHome, federation: Federation) -> None:
    federation.wait_until(lambda _: crowded_out(home) > 0, DEADLINE_S)
    log = home.log.read_text()
    assert log.count(CROWDED) >= 1
    assert "Traceback" not in log


@pytest.mark.parametrize("kind", ["silent", "half", "stranger", "member"])
def test_idle_unauthenticated_connections_do_not_displace_members(
    kind: str, lay_out_sites: LayOut, records: Records, tmp_path: Path
) -> None:
    """A member's connections count as unauthenticated until the first call."""
    homes = lay_out_sites(2, rounds=400)
    make_identity("site-x", datetime.now(UTC)).save(tmp_path / "keys")
    connect = {
        "silent": silent,
        "half": half_a_handshake,
        "stranger": stranger(tmp_path / "keys"),
        "member": stranger(homes[1].directory / "keys"),
    }[kind]
    with running(homes, FEW) as federation, contextlib.ExitStack() as connections:
        before = open_files(federation)
        for _ in range(MANY if kind == "silent" else FEW):
            with contextlib.suppress(OSError):
                connections.enter_context(connect(homes[0]))
        wait_for_rounds(federation, 2)
        if kind != "stranger":  # TLS refuses those at once
            check_that_it_was_reported(homes[0], federation)
        assert open_files(federation) < FEW
        connections.close()
        federation.wait_until(lambda _: open_files(federation) <= before + 16, DEADLINE_S)
        wait_for_rounds(federation, 1)
        federation.stop()
        check_histories(homes, records)


def test_a_member_with_hundreds_of_connections_keeps_four(
    lay_out_sites: LayOut, records: Records
) -> None:
    """It makes a call on each connection, so all are authenticated."""
    node, member, honest = lay_out_sites(3, rounds=400)
    scene = SimpleNamespace(node=node, attacker=member)
    with running([node, honest], FEW) as federation, contextlib.ExitStack() as connections:
        before = open_files(federation)
        for _ in range(FEW):
            with contextlib.suppress(OSError):
                line = connections.enter_context(Raw(scene))
                line.call("Hello", b"")
        federation.wait_until(lambda _: open_files(federation) <= before + 32, DEADLINE_S)
        wait_for_rounds(federation, 2)
        federation.stop()
        check_histories([node, honest], records)
        assert "Traceback" not in node.log.read_text()


@pytest.mark.parametrize("files", [1024, 8192])
def test_a_flood_of_unauthenticated_connections_disturbs_no_round(
    files: int, lay_out_sites: LayOut, records: Records
) -> None:
    homes = lay_out_sites(3, rounds=400)
    with running(homes, files) as federation, contextlib.ExitStack() as connections:
        before, reached = open_files(federation), round_of(federation)
        begin = time.monotonic()
        seconds = 0
        while seconds < 10 or round_of(federation) <= reached:
            seconds += 1
            assert seconds < DEADLINE_S
            for _ in range(120):
                connections.enter_context(contextlib.closing(connected(homes[0])))
            time.sleep(max(0.0, begin + seconds - time.monotonic()))
            federation.check()
        check_that_it_was_reported(homes[0], federation)
        federation.wait_until(lambda _: CALM in homes[0].log.read_text(), DEADLINE_S)
        assert open_files(federation) <= before + 300
        wait_for_rounds(federation, 2)
        federation.stop()
        check_histories(homes, records)


@contextlib.contextmanager
def without_descriptors(federation: Federation) -> Iterator[None]:
    """Exhaust site-a's descriptors; return when it has reported that."""
    pid, log = federation.pid(A), federation.homes[A].log
    usual = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    before = log.read_text().count(NONE_LEFT)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (5, usual[1]))
    try:
        # Not its status: its sockets cannot accept a connection meanwhile.
        Federation([]).wait_until(lambda _: log.read_text().count(NONE_LEFT) > before, DEADLINE_S)
        yield
        federation.check()
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, usual)
    federation.wait_until(lambda _: log.read_text().count(SOME_LEFT) > before, DEADLINE_S)


def test_steps_without_a_file_descriptor_are_retried(
    lay_out_sites: LayOut, records: Records
) -> None:
    """Repeatedly, no file, journal, connection or worker can be opened for a while."""
    homes = lay_out_sites(2, rounds=400)
    log = homes[0].log
    with Federation(homes) as federation:
        federation.wait_until(lambda s: s[A] is not None and s[A]["round"] >= 1, DEADLINE_S)
        for _ in range(3):
            with without_descriptors(federation):
                pass
            wait_for_rounds(federation, 1)
        # A worker that must be started at that time does not stop the node either.
        status = federation.status()[A]
        assert status is not None
        with without_descriptors(federation):
            os.kill(status["worker_pid"], signal.SIGKILL)
        wait_for_rounds(federation, 2)
        federation.wait_until(
            lambda _: metrics_of(homes[0])["lightyear_descriptors_low"] == 0, DEADLINE_S
        )
        federation.stop()
        check_histories(homes, records)
        assert "Traceback" not in log.read_text()
