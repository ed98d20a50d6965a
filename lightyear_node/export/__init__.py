"""Taking a model out of a node: what is there, the file, and the card that goes with it.

Reads the state directory beside a node that may be running, without its lock, and changes nothing
in it.  Never imports torch: tensors are bytes here, copied from one file into another.
"""

from __future__ import annotations

from enum import StrEnum


class Which(StrEnum):
    """The model that the sites share, or the one that a rule such as Ditto gives each its own."""

    SHARED = "shared"
    PERSONAL = "personal"
