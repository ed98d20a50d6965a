"""Checks the values of the attacks' options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightyear_node.errors import ConfigError


def number(name: str, value: Any) -> float:
    """The value as a finite number."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if not plain or not math.isfinite(value):
        raise ConfigError(f"option {name} is {value!r}, not a number")
    return float(value)


def not_negative(name: str, value: Any) -> float:
    """The value as a number of at least 0."""
    if (found := number(name, value)) < 0:
        raise ConfigError(f"option {name} is {value!r}, which is below 0")
    return found


def positive(name: str, value: Any, *, at_most: float = math.inf) -> float:
    """The value as a number above 0."""
    if not 0 < (found := number(name, value)) <= at_most:
        limit = f" and at most {at_most:g}" if at_most < math.inf else ""
        raise ConfigError(f"option {name} is {value!r}, not above 0{limit}")
    return found


def whole(name: str, value: Any, *, at_least: int = 0) -> int:
    """The value as a whole number."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigError(f"option {name} is {value!r}, not a whole number of at least {at_least}")
    return value


def one_of(name: str, value: Any, known: Sequence[str]) -> str:
    """The value, which is one of these words."""
    if value not in known:
        raise ConfigError(f"option {name} is {value!r}", hint=f"known: {', '.join(known)}")
    return str(value)
