"""lightyear-node: hospitals train a model together, peer to peer.

`from lightyear_node import Task` is all that bringing your own model needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightyear_node.worker.task import Task

__version__ = "0.1.0"
__all__ = ["Task", "__version__"]


def __getattr__(name: str) -> Any:
    # Loaded on demand: the daemon and the command line must start without the worker's world.
    if name == "Task":
        from lightyear_node.worker.task import Task

        return Task
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
