"""Notifies systemd, if it started the node: ready, watchdog, status text, stopping.

The protocol of sd_notify(3): one datagram of `KEY=value` lines.  Without systemd nothing is sent.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

START_EXTENDED_S = 30.0
"""Each notification during the start extends its timeout by this: a model may take minutes."""
STATUS_LENGTH_MAX = 500


class SystemdNotifier:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        self._watchdog_s = _watchdog_s(environment)
        self._sent_at = -self._watchdog_s
        self._status = ""
        self._socket: socket.socket | None = None
        """Kept open: a node without free file descriptors must still answer the watchdog."""

    def starting(self) -> None:
        self._send(f"EXTEND_TIMEOUT_USEC={START_EXTENDED_S * 1e6:.0f}")

    def ready(self) -> None:
        self._send("READY=1")

    def stopping(self) -> None:
        self._send("STOPPING=1", "STATUS=stopping")
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def alive(self, status: str) -> None:
        """Notify if the watchdog is due or `status` has changed; call on every turn of the loop."""
        if not self._address:
            return
        now = time.monotonic()
        # Three times per interval, so that one late turn does no harm.
        due = self._watchdog_s > 0 and now - self._sent_at >= self._watchdog_s / 3
        if not due and status == self._status:
            return
        self._sent_at, self._status = now, status
        text = " ".join(status.split())[:STATUS_LENGTH_MAX]
        self._send("WATCHDOG=1", f"STATUS={text}")

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._socket.setblocking(False)
            self._socket.sendto("\n".join(lines).encode(), address)
        except OSError:
            pass  # systemd does not listen; its own timeouts apply


def _watchdog_s(environment: Mapping[str, str]) -> float:
    """Watchdog interval in seconds; 0 if disabled."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    interval_us = environment.get("WATCHDOG_USEC", "")
    return int(interval_us) / 1e6 if interval_us.isdecimal() else 0.0
