"""Notifications to systemd, over a real socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightyear_node.observe import systemd as systemd_module
from lightyear_node.observe.systemd import STATUS_LENGTH_MAX, SystemdNotifier
from tests.support.descriptor_exhaustion import no_descriptors


class SystemdSocket:
    def __init__(self, address: str, name: str) -> None:
        self.environment = {"NOTIFY_SOCKET": name}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.setblocking(False)

    def received(self) -> list[str]:
        messages = []
        while True:
            try:
                messages.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return messages

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["a path", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SystemdSocket]:
    path = str(tmp_path / "notify")
    abstract = f"lightyear-test-{os.getpid()}"
    names = {"a path": (path, path), "abstract": (f"\0{abstract}", f"@{abstract}")}
    listening = SystemdSocket(*names[request.param])
    yield listening
    listening.close()


def test_all_states_are_notified(systemd: SystemdSocket) -> None:
    notifier = SystemdNotifier(systemd.environment)
    notifier.starting()
    notifier.ready()
    notifier.alive("round 3: training")
    notifier.alive("round 3: training")
    notifier.alive("round 3: waiting\nREADY=0")
    notifier.stopping()
    assert systemd.received() == [
        "EXTEND_TIMEOUT_USEC=30000000",
        "READY=1",
        "WATCHDOG=1\nSTATUS=round 3: training",
        "WATCHDOG=1\nSTATUS=round 3: waiting READY=0",
        "STOPPING=1\nSTATUS=stopping",
    ]


def test_notifications_work_without_free_descriptors(systemd: SystemdSocket) -> None:
    notifier = SystemdNotifier(systemd.environment)
    notifier.ready()
    with no_descriptors():
        notifier.alive("waiting for file descriptors")
    notifier.stopping()
    assert systemd.received()[1] == "WATCHDOG=1\nSTATUS=waiting for file descriptors"


def test_the_watchdog_is_notified_often_enough(
    systemd: SystemdSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(systemd_module.time, "monotonic", lambda: now)
    notifier = SystemdNotifier({**systemd.environment, "WATCHDOG_USEC": "3000000"})
    counts = []
    for _ in range(60):
        notifier.alive("collecting")
        counts.append(len(systemd.received()))
        now += 0.2
    assert sum(counts) == pytest.approx(12, abs=1)
    other_process = {"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}
    notifier = SystemdNotifier({**systemd.environment, **other_process})
    for _ in range(60):
        notifier.alive("collecting")
        now += 0.2
    assert len(systemd.received()) == 1, "only the new status"


def test_a_long_status_is_cut(systemd: SystemdSocket) -> None:
    SystemdNotifier(systemd.environment).alive("x" * 100_000)
    assert systemd.received() == ["WATCHDOG=1\nSTATUS=" + "x" * STATUS_LENGTH_MAX]


def test_a_missing_socket_is_ignored(tmp_path: Path) -> None:
    SystemdNotifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready()
    SystemdNotifier({}).ready()
