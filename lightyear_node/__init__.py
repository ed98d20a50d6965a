"""lightyear-node: hospitals train a model together, peer to peer.

The names in `__all__` are the public API; docs/api.md describes them.  Every other name of the
package may change between versions.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightyear_node.errors import LightyearError
    from lightyear_node.lab.partition import partition
    from lightyear_node.lab.results_api import read_results
    from lightyear_node.lab.simulate_api import simulate
    from lightyear_node.learning.agreement import ntk_agreement
    from lightyear_node.learning.rules.base import Candidate, Judgement
    from lightyear_node.types import Reason, Verdict
    from lightyear_node.worker.task import Task, load_task

__version__ = "0.1.0"
__all__ = [
    "Candidate",
    "Judgement",
    "LightyearError",
    "Reason",
    "Task",
    "Verdict",
    "__version__",
    "load_task",
    "ntk_agreement",
    "partition",
    "read_results",
    "simulate",
]

_MODULES = {
    "Candidate": "learning.rules.base",
    "Judgement": "learning.rules.base",
    "LightyearError": "errors",
    "Reason": "types",
    "Task": "worker.task",
    "Verdict": "types",
    "load_task": "worker.task",
    "ntk_agreement": "learning.agreement",
    "partition": "lab.partition",
    "read_results": "lab.results_api",
    "simulate": "lab.simulate_api",
}
"""Where each public name is defined, relative to this package."""


def __getattr__(name: str) -> Any:
    # Imported on first use: the daemon and the command line start without torch.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
