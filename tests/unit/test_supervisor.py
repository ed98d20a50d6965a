"""What systemd would hear, at the other end of a real socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightyear_node.observe import supervisor
from lightyear_node.observe.supervisor import STATUS_LENGTH_MAX, Supervisor


class Systemd:
    def __init__(self, address: str, name: str) -> None:
        self.environment = {"NOTIFY_SOCKET": name}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.setblocking(False)

    def heard(self) -> list[str]:
        words = []
        while True:
            try:
                words.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return words

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["a path", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Systemd]:
    path = str(tmp_path / "notify")
    abstract = f"lightyear-test-{os.getpid()}"
    names = {"a path": (path, path), "abstract": (f"\0{abstract}", f"@{abstract}")}
    listening = Systemd(*names[request.param])
    yield listening
    listening.close()


def test_it_hears_of_every_turn_in_the_nodes_life(systemd: Systemd) -> None:
    told = Supervisor(systemd.environment)
    told.starting()
    told.ready()
    told.alive("round 3: training")
    told.alive("round 3: training")
    told.alive("round 3: waiting\nREADY=0")
    told.stopping()
    assert systemd.heard() == [
        "EXTEND_TIMEOUT_USEC=30000000",
        "READY=1",
        "WATCHDOG=1\nSTATUS=round 3: training",
        "WATCHDOG=1\nSTATUS=round 3: waiting READY=0",
        "STOPPING=1\nSTATUS=stopping",
    ]


def test_a_watchdog_hears_often_enough(systemd: Systemd, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now)
    told = Supervisor({**systemd.environment, "WATCHDOG_USEC": "3000000"})
    heard = []
    for _ in range(60):
        told.alive("collecting")
        heard.append(len(systemd.heard()))
        now += 0.2
    assert sum(heard) == pytest.approx(12, abs=1)
    for_another = {"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}
    assert Supervisor({**systemd.environment, **for_another})._silence_max_s == 0


def test_long_words_are_cut(systemd: Systemd) -> None:
    Supervisor(systemd.environment).alive("x" * 100_000)
    assert systemd.heard() == ["WATCHDOG=1\nSTATUS=" + "x" * STATUS_LENGTH_MAX]


def test_nobody_listening_is_no_trouble(tmp_path: Path) -> None:
    Supervisor({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready()
    Supervisor({}).ready()
