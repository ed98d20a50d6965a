"""Log lines for people: one event per line, on standard error."""

from __future__ import annotations

import logging
import sys

NAME = "lightyear_node"


class _Escaped(logging.Formatter):
    """What peers or users' code put into a message cannot move the cursor or forge a line."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def set_up(level: str) -> logging.Logger:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Escaped("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger(NAME)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    return logger
