"""Shortens site names to a given width so that they stay distinct."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.measure import Measurement
    from rich.text import Text

ELLIPSIS = "…"
WIDTH_MIN = 12
"""Minimum width that a column of names requests; it may get less."""


def shortened(names: Sequence[str], width: int) -> dict[str, str]:
    """Cut each name to at most `width` characters, in a place where all stay distinct.

    If there is no such place, the cut names are numbered.
    """
    long = [name for name in names if len(name) > width]
    kept = max(width - len(ELLIPSIS), 0)
    short = {name: name for name in names}
    for tail in sorted(range(kept + 1), key=lambda tail: abs(2 * tail - kept)):
        cut = {name: name[: kept - tail] + ELLIPSIS + name[len(name) - tail :] for name in long}
        if len(set(cut.values())) == len(long):
            return short | cut
    for number, name in enumerate(long, 1):
        short[name] = name[: max(kept - len(str(number)), 0)] + ELLIPSIS + str(number)
    return short


@dataclass(frozen=True, slots=True)
class NameCell:
    """One of several names in a table column, shortened to the available width."""

    name: str
    among: Sequence[str]
    style: str = ""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        longest = max(map(len, self.among))
        return Measurement(min(WIDTH_MIN, longest), longest).clamp(max_width=options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        short = shortened(self.among, options.max_width)[self.name]
        yield Text(short, self.style, no_wrap=True)
