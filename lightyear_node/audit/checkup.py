"""Does the journal of a running node still hold?  For the node itself, which has nobody to ask."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightyear_node.audit.export import opened
from lightyear_node.audit.verify import verify
from lightyear_node.errors import LightyearError


def problem_with(state_dir: Path, keys: Sequence[bytes]) -> str | None:
    """What is wrong with it, and what to do; None if it holds.  `keys` are the site's own."""
    try:
        with opened(state_dir) as source:
            finding = verify(source, keys).finding
    except LightyearError as problem:
        return f"{problem}; {problem.hint}"
    return f"our journal: {finding.about}; {finding.advice}" if finding is not None else None
