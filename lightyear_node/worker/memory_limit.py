"""Limits the worker's memory, so that a worker that runs out does not take the machine with it.

RLIMIT_DATA counts private writable memory: what torch and Python allocate.  Unlike RLIMIT_AS it
does not count mapped weights files and the address space that CUDA reserves.  A control group would
be more exact, but an unprivileged service cannot create one.
"""

from __future__ import annotations

import errno
import resource

from lightyear_node.errors import ConfigError


def limit_memory(bytes_max: int) -> None:
    """Limit this process, and each process that it starts, to this many bytes."""
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (bytes_max, bytes_max))
    except (ValueError, OSError) as problem:
        raise ConfigError(
            f"`worker.memory_max` cannot be set here: {problem}",
            hint="take it out of node.yaml, and limit the whole service: `MemoryMax` of systemd",
        ) from None


def ran_out(problem: BaseException) -> bool:
    """Whether an exception means that main memory could not be allocated."""
    if isinstance(problem, OSError):
        return problem.errno == errno.ENOMEM
    # torch raises a RuntimeError with this text.
    text = str(problem) if isinstance(problem, RuntimeError) else ""
    return isinstance(problem, MemoryError) or "can't allocate memory" in text


def describe_limit(bytes_max: int) -> str:
    return f"`worker.memory_max` in node.yaml is {bytes_max / 2**30:.1f} GiB, raise it"
