"""The command line in a pseudo-terminal, with its output and keyboard input."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any, Self

from lightyear_node.lab.federation import package_environment

DEADLINE_S = 60.0
ROWS, COLUMNS = 40, 120
COMMAND = [sys.executable, "-m", "lightyear_node"]


def environment(**changes: str) -> dict[str, str]:
    """The environment of an ordinary terminal, independent of that of the tests."""
    removed = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
    kept = {key: value for key, value in package_environment().items() if key not in removed}
    return {**kept, "TERM": "xterm-256color", **changes}


class Terminal:
    """A context manager that ends the process on exit."""

    def __init__(self, *arguments: str, cwd: Path, **changes: str) -> None:
        self._controller, self._device = pty.openpty()
        fcntl.ioctl(self._device, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.before = self.settings()
        self.raw = ""
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=cwd,
            env=environment(**changes),
            stdin=self._device,
            stdout=self._device,
            stderr=self._device,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._controller)
        os.close(self._device)

    def settings(self) -> list[Any]:
        """The terminal's attributes, such as echo and line mode."""
        return termios.tcgetattr(self._device)

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", self.raw)

    def wait_for(self, *words: str, since: int = 0) -> int:
        """Wait until all of these have appeared after `since`; return the length of the text."""
        deadline = time.monotonic() + DEADLINE_S
        while not all(word in self.text[since:] for word in words):
            assert time.monotonic() < deadline, f"no {words} in:\n{self.text[since:][-4000:]}"
            assert self._read() or self.process.poll() is None, f"ended with:\n{self.text}"
        return len(self.text)

    def type(self, keys: str) -> None:
        os.write(self._controller, keys.encode())

    def exit_code(self) -> int:
        code = self.process.wait(DEADLINE_S)
        while self._read():
            pass
        return code

    def _read(self) -> bool:
        ready, _, _ = select.select([self._controller], [], [], 0.1)
        if ready:
            self.raw += os.read(self._controller, 1 << 16).decode(errors="replace")
        return bool(ready)
