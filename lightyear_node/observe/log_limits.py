"""Limits how much peers and strangers can make this node write to its log.

Every line that names a peer, comes from a library (gRPC, asyncio) or is about HTTP may have been
caused from outside.  At most `LINES_MAX` of these are written per hour, peer and kind, each cut to
`CHARS_MAX`; a flood of one kind does not suppress other kinds.  A kind is an event name and the
reason of a refusal, never text from a peer.  The node's own lines are not limited.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from lightyear_node.observe.log import LIBRARY, NAME

LINES_MAX = 10
HOUR_S = 3600.0
CHARS_MAX = 500
STRANGERS = "strangers"
"""Stands for the peer's name: all unidentified clients share one budget per kind."""
HTTP = "http"

_Key = tuple[str, str]


class LogLimits(logging.Filter):
    """A filter for several handlers: each record is decided, and counted, once.

    Records come from any thread.  An hour begins with the first line of its kind.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._lock = threading.Lock()
        self._written: dict[_Key, tuple[float, int]] = {}
        """When the hour of each key began, and how many lines it has written since."""
        self._suppressed: Counter[str] = Counter()
        self._suppressed_since: dict[str, float] = {}
        self.on_suppressed: Callable[[], None] = lambda: None

    def filter(self, record: logging.LogRecord) -> bool:
        passes: bool | None = getattr(record, "passes", None)
        if passes is None:
            key = _key(record)
            passes = record.passes = key is None or self._take(key)
            if key is not None and passes:
                _cut(record)
        return passes

    def ended_hours(self) -> list[tuple[str, int]]:
        """Return and forget the sources with suppressed lines whose hour is over, with counts."""
        now = self._now()
        with self._lock:
            ended = [
                source for source, since in self._suppressed_since.items() if now - since >= HOUR_S
            ]
            for source in ended:
                del self._suppressed_since[source]
            return [(source, self._suppressed.pop(source)) for source in ended]

    def _take(self, key: _Key) -> bool:
        now = self._now()
        with self._lock:
            since, count = self._written.get(key, (now, 0))
            if now - since >= HOUR_S:
                since, count = now, 0
            if count < LINES_MAX:
                self._written[key] = since, count + 1
                return True
            source, _ = key
            self._suppressed_since.setdefault(source, now)
            self._suppressed[source] += 1
        self.on_suppressed()
        return False


def _key(record: logging.LogRecord) -> _Key | None:
    """Return the possible source and the kind of a line; None for one of the node's own."""
    if record.name.partition(".")[0] != NAME:
        return STRANGERS, f"{LIBRARY} {record.name}"
    event, kind = getattr(record, "event", None), getattr(record, "kind", None)
    peer = getattr(record, "peer", None)
    if peer is None and event != HTTP:
        return None
    return peer or STRANGERS, f"{event} {kind}"


def _cut(record: logging.LogRecord) -> None:
    try:
        text = record.getMessage()
    except (TypeError, ValueError):  # a bug in a library; the handler reports it
        return
    if len(text) > CHARS_MAX:
        record.msg, record.args = "%s", (f"{text[:CHARS_MAX]}…",)
