"""What systemd is told, where it started the node: ready, alive, what it is doing, stopping.

The protocol of sd_notify(3) is one datagram of `KEY=value` lines; without systemd nothing happens.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

START_EXTENDED_S = 30.0
"""While it starts, every word asks for so much more time: building a model may take minutes."""
STATUS_LENGTH_MAX = 500


class Supervisor:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        self._silence_max_s = _watchdog_s(environment)
        self._told_at = -self._silence_max_s
        self._status = ""

    def starting(self) -> None:
        self._tell(f"EXTEND_TIMEOUT_USEC={START_EXTENDED_S * 1e6:.0f}")

    def ready(self) -> None:
        self._tell("READY=1")

    def stopping(self) -> None:
        self._tell("STOPPING=1", "STATUS=stopping")

    def alive(self, status: str) -> None:
        """To be called whenever the loop turns; says something when it is time or there is news."""
        if not self._address:
            return
        now = time.monotonic()
        # Three times as often as it must be, so that one late turn costs nothing.
        due = self._silence_max_s > 0 and now - self._told_at >= self._silence_max_s / 3
        if not due and status == self._status:
            return
        self._told_at, self._status = now, status
        line = " ".join(status.split())[:STATUS_LENGTH_MAX]
        self._tell("WATCHDOG=1", f"STATUS={line}")

    def _tell(self, *lines: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
                line.setblocking(False)
                line.sendto("\n".join(lines).encode(), address)
        except OSError:
            pass  # a supervisor that does not listen will find out by its own means


def _watchdog_s(environment: Mapping[str, str]) -> float:
    """How long a silence is taken for a hang; 0 if nobody minds."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    wanted = environment.get("WATCHDOG_USEC", "")
    return int(wanted) / 1e6 if wanted.isdecimal() else 0.0
