"""Durations, rates and progress as people read them, and whether a terminal can be drawn on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightyear_node.space import size_text

if TYPE_CHECKING:
    from rich.console import Console


def drawable(console: Console) -> bool:
    """Whether a picture may be drawn again and again; elsewhere lines are printed.

    A terminal that calls itself dumb cannot go back to what is on it.
    """
    return console.is_terminal and not console.is_dumb_terminal


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def rate_text(per_second: float) -> str:
    """Of things that are counted; slow ones by the minute or by the hour."""
    for each_s, unit in ((1, "s"), (60, "min"), (3600, "h")):
        if per_second * each_s >= 1 or unit == "h":
            break
    value = per_second * each_s
    return f"{value:.0f}/{unit}" if value >= 10 else f"{value:.1f}/{unit}"


def progress_words(pace: Mapping[str, Any], *, weights: bool = False) -> str:
    """Of a `Pace` as `status` has it; `weights` are counted in bytes."""
    count = size_text if weights else str
    words = f"{count(pace['done'])} of {count(pace['total'])}"
    if pace["rate"]:
        words += (
            f", {size_text(round(pace['rate']))}/s" if weights else f", {rate_text(pace['rate'])}"
        )
    if pace["left_s"] is not None:
        words += f", about {duration(pace['left_s'])} left"
    return words
