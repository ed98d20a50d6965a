"""Splits the output of the user's code into log lines, with limits on length and rate.

A progress bar that is redrawn a thousand times, or a print in the innermost loop, must neither fill
a disk nor hide the node's own log.
"""

from __future__ import annotations

import re

LINE_CHARS_MAX = 500
CUT_BYTES = 4 * LINE_CHARS_MAX
LINES_PER_S = 5.0
BURST_LINES = 100


class OutputLines:
    """Turns bytes into lines; `now` is a time in seconds."""

    def __init__(self) -> None:
        self._rest = b""
        self._cut = False
        self._allowed = float(BURST_LINES)
        self._at = 0.0
        self._left_out = 0

    def feed(self, content: bytes, now: float) -> list[str]:
        *whole, self._rest = re.split(rb"[\r\n]+", self._rest + content)
        if self._cut and whole:
            # The beginning of an overlong line was already returned.
            whole, self._cut = whole[1:], False
        if self._cut:
            self._rest = b""
        elif len(self._rest) > CUT_BYTES:
            whole.append(self._rest)
            self._rest, self._cut = b"", True
        return self._limited([text for line in whole if (text := _text(line))], now)

    def end(self, now: float) -> list[str]:
        """Return the last line, which may lack a line break."""
        rest, self._rest = self._rest, b""
        return self._limited([_text(rest)] if rest.strip() else [], now)

    def _limited(self, lines: list[str], now: float) -> list[str]:
        self._allowed = min(BURST_LINES, self._allowed + (now - self._at) * LINES_PER_S)
        self._at = now
        kept = []
        for line in lines:
            if self._allowed < 1:
                self._left_out += 1
                continue
            self._allowed -= 1
            if self._left_out:
                kept.append(f"({self._left_out} lines were left out)")
                self._left_out = 0
            kept.append(line)
        return kept


def _text(line: bytes) -> str:
    text = line.decode(errors="backslashreplace").strip()
    return text if len(text) <= LINE_CHARS_MAX else f"{text[:LINE_CHARS_MAX]} …"
