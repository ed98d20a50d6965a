"""The log: one event per line, on standard error, for people or as JSON for programs.

Whoever logs may say with `extra` which `event` it is and which `peer`, `round` and `phase` it is
about.  The newest lines are also kept in memory, for the node's page.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import deque
from datetime import UTC, datetime
from typing import Any

NAME = "lightyear_node"
RECENT_MAX = 200
LIBRARY = "library"
"""The event of what other packages log."""
_ABOUT = ("event", "round", "phase", "peer")


def escaped(text: str) -> str:
    """What peers or users' code put into a message cannot move the cursor or forge a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def as_plain(record: logging.LogRecord) -> dict[str, Any]:
    """A line of the log for programs; what it says nothing about is left out."""
    about = {key: getattr(record, key, None) for key in _ABOUT}
    if record.name.partition(".")[0] != NAME:
        about["event"] = about["event"] or LIBRARY
    return {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        **{key: value for key, value in about.items() if value is not None},
        "message": escaped(record.getMessage()),
    }


class _Human(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


class _Json(logging.Formatter):
    """What was escaped once stays so for whoever shows the parsed line."""

    def format(self, record: logging.LogRecord) -> str:
        plain = as_plain(record)
        if record.exc_info:
            plain["traceback"] = escaped(self.formatException(record.exc_info))
        return json.dumps(plain)


class Recent(logging.Handler):
    """The newest lines, oldest first; read from other threads."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[dict[str, Any]] = deque(maxlen=RECENT_MAX)
        self._count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self._count += 1
        self._lines.append({"seq": self._count, **as_plain(record)})

    def lines(self) -> list[dict[str, Any]]:
        self.acquire()
        try:
            return list(self._lines)
        finally:
            self.release()


def set_up(level: str, format: str = "human") -> logging.Logger:
    handler = logging.StreamHandler(sys.stderr)
    human = _Human("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
    handler.setFormatter(_Json() if format == "json" else human)
    logger = logging.getLogger(NAME)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    # Other packages' warnings are lines of this log, too.
    logging.captureWarnings(True)
    everybody = logging.getLogger()
    everybody.handlers[:] = [handler]
    everybody.setLevel(logging.WARNING)
    return logger
