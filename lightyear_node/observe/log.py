"""The log: one event per line on standard error, as text or as JSON.

The `extra` of a record may name its `event`, `peer`, `round` and `phase`.  The newest lines are
also kept in memory, for the dashboard.
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
"""The event name of lines from other packages."""
_FIELDS = ("event", "round", "phase", "peer")


def escaped(text: str) -> str:
    """Escape control characters, so that text from outside cannot forge a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def as_plain(record: logging.LogRecord) -> dict[str, Any]:
    """Return a log line as JSON fields, without those that the record does not have."""
    fields = {key: getattr(record, key, None) for key in _FIELDS}
    if record.name.partition(".")[0] != NAME:
        fields["event"] = fields["event"] or LIBRARY
    return {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        **{key: value for key, value in fields.items() if value is not None},
        "message": escaped(record.getMessage()),
    }


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


class JsonFormatter(logging.Formatter):
    """Texts are escaped before JSON encoding: they stay escaped after a program has parsed them."""

    def format(self, record: logging.LogRecord) -> str:
        plain = as_plain(record)
        if record.exc_info:
            plain["traceback"] = escaped(self.formatException(record.exc_info))
        return json.dumps(plain)


class RecentLines(logging.Handler):
    """Keeps the newest lines, oldest first.  `lines` may be called from other threads."""

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
    """Configure the root logger and the package's logger, and return the latter."""
    handler = logging.StreamHandler(sys.stderr)
    text = TextFormatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonFormatter() if format == "json" else text)
    logger = logging.getLogger(NAME)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    # Warnings of other packages go to this log, too.
    logging.captureWarnings(True)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    return logger
