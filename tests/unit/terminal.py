"""A real terminal with the command line in it, and somebody who reads and types."""

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
    """Of a common terminal, whatever these tests were started in."""
    ours = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
    kept = {key: value for key, value in package_environment().items() if key not in ours}
    return {**kept, "TERM": "xterm-256color", **changes}


class Terminal:
    """Used as a context manager, which leaves no process."""

    def __init__(self, *arguments: str, cwd: Path, **changes: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._theirs = theirs
        self.before = self.settings()
        self.raw = ""
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=cwd,
            env=environment(**changes),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    def settings(self) -> list[Any]:
        """Of the terminal: whether it echoes, and whether it waits for Enter."""
        return termios.tcgetattr(self._theirs)

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", self.raw)

    def wait_for(self, *words: str, since: int = 0) -> int:
        """Until all of these have appeared; gives where the text ends, to go on from there."""
        deadline = time.monotonic() + DEADLINE_S
        while not all(word in self.text[since:] for word in words):
            assert time.monotonic() < deadline, f"no {words} in:\n{self.text[since:][-4000:]}"
            assert self._read() or self.process.poll() is None, f"ended with:\n{self.text}"
        return len(self.text)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def exit_code(self) -> int:
        code = self.process.wait(DEADLINE_S)
        while self._read():
            pass
        return code

    def _read(self) -> bool:
        ready, _, _ = select.select([self._ours], [], [], 0.1)
        if ready:
            self.raw += os.read(self._ours, 1 << 16).decode(errors="replace")
        return bool(ready)
