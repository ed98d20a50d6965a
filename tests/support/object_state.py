"""The state of an object and its parts, read without naming a single attribute.

For tests that an event changes nothing, and that no table grows without limit, whatever the tables
are called.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

PACKAGE = "lightyear_node."


def parts_of(root: object) -> list[object]:
    """Return an object of the product and all others that it reaches through attributes."""
    found = [root]
    for part in found:
        held = (value for value in vars(part).values() if _is_part(value))
        found += [value for value in held if not any(value is known for known in found)]
    return found


def state_of(root: object) -> dict[str, Any]:
    """Return a copy of all values in an object and its parts, by class and attribute."""
    return {
        f"{type(part).__name__}.{name}": copy.deepcopy(value)
        for part in parts_of(root)
        for name, value in vars(part).items()
        if not _is_part(value)
    }


def tables_of(root: object) -> Iterator[tuple[object, str]]:
    """Yield every collection in an object and its parts, as its owner and its name."""
    for part in parts_of(root):
        for name, value in vars(part).items():
            if isinstance(value, dict | set | frozenset | list | tuple):
                yield part, name


def _is_part(value: object) -> bool:
    """Whether this is an object of the product with attributes; records have slots instead."""
    return type(value).__module__.startswith(PACKAGE) and hasattr(value, "__dict__")
