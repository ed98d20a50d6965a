"""Access to the SQLite connections of the code under test, to change their settings or fail."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar
from unittest.mock import patch

Kind = TypeVar("Kind", bound=sqlite3.Connection)


@contextmanager
def recorded_connections(factory: type[Kind]) -> Iterator[list[Kind]]:
    """Make connections with `factory`, and collect those that are opened meanwhile."""
    opened: list[Kind] = []

    class Recorded(factory):  # type: ignore[valid-type, misc]
        def __init__(self, *arguments: object, **named: object) -> None:
            super().__init__(*arguments, **named)
            opened.append(self)

    with patch.object(sqlite3, "connect", partial(sqlite3.connect, factory=Recorded)):
        yield opened
