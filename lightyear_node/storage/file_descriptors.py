"""File descriptors: the limit of this process, its shares, and waiting when none are left.

Unauthenticated clients can open any number of connections, so they get a fixed share.  The rest is
for peers, files and the worker.  A step that finds no free descriptor is retried, like a step that
finds the disk full.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from lightyear_node.errors import DiskFull, Shortage, TooManyFiles

EXHAUSTED = (errno.EMFILE, errno.ENFILE)
"""Error numbers: none left for this process, or for the whole machine."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
OURS = 128
"""For the journal, logs, HTTP, the admin socket, the worker's pipes, and gRPC itself."""
PER_PEER = 4
"""For our connections to a peer, and the files of an update."""
PER_PEER_CONNECTIONS = 4
STRANGERS_MIN, STRANGERS_MAX = 16, 256
CONNECTIONS_MAX = 4096
MACOS_MAX = 10240
POLL_S = 0.2
PAUSE_S, PAUSE_S_MAX = 0.2, 30.0

Result = TypeVar("Result")


def raise_limit() -> int:
    """Set the soft limit of open files to the hard one; returns the limit in force."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (hard, MACOS_MAX):  # macOS may report "unlimited" and grant only MACOS_MAX
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            break
    return limit()


def limit() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS_MAX * 16 if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True, slots=True)
class ConnectionShare:
    """How many incoming connections may be open at once."""

    connections: int
    """In total: the limit minus our own needs."""
    strangers: int
    """Without an authenticated call so far."""

    @classmethod
    def of(cls, limit: int, peers: int) -> Self:
        connections = min(limit - OURS - PER_PEER * peers, CONNECTIONS_MAX)
        # Between two counts, half as many again may be opened.
        strangers = (connections - PER_PEER_CONNECTIONS * peers) * 2 // 3
        strangers = max(STRANGERS_MIN, min(strangers, STRANGERS_MAX))
        return cls(max(connections, 2 * STRANGERS_MIN + PER_PEER_CONNECTIONS * peers), strangers)


def too_few(limit: int, peers: int) -> str | None:
    """A warning if the limit is too low for this number of peers; None otherwise."""
    needed = OURS + (PER_PEER + PER_PEER_CONNECTIONS) * peers + 2 * STRANGERS_MIN
    if limit >= needed:
        return None
    return (
        f"this process may have {limit} files open, but {peers} peers can need {needed}: raise"
        " `LimitNOFILE` of the service, or `ulimit -n`"
    )


def none_left() -> bool:
    """Whether no file can be opened now."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as problem:
        return problem.errno in EXHAUSTED
    return False


@contextlib.contextmanager
def exhaustion_raised(what: str) -> Iterator[None]:
    """Translate an OSError for lack of descriptors into `TooManyFiles`."""
    try:
        yield
    except OSError as problem:
        if problem.errno not in EXHAUSTED:
            raise
        raise TooManyFiles(f"{what}: {problem.strerror}") from problem


def shortage(what: object, problem: OSError) -> Shortage | None:
    """The error for a full disk or for a lack of descriptors; None for other problems."""
    if problem.errno in DISK_FULL:
        return DiskFull(f"{what}: {problem.strerror}")
    if problem.errno in EXHAUSTED:
        return TooManyFiles(f"{what}: {problem.strerror}")
    return None


class DescriptorListener(Protocol):
    """Notified once when there are none left, and once when that is over."""

    def descriptors_low(self, text: str) -> None: ...

    def descriptors_recovered(self, text: str) -> None: ...


class Descriptors:
    """For use in one event loop; `problem` may be read from any thread."""

    def __init__(self, listener: DescriptorListener) -> None:
        self.problem: str | None = None
        """The current problem and what to do about it; None if there is none."""
        self._listener = listener
        self._waiting = 0

    async def retry(
        self, step: Callable[[], Awaitable[Result]], meanwhile: Callable[[], None] = lambda: None
    ) -> Result:
        """Run a step until it does not raise `TooManyFiles`; `meanwhile` is called between."""
        pause_s = PAUSE_S
        while True:
            try:
                return await step()
            except TooManyFiles as problem:
                self._short(str(problem))
            self._waiting += 1
            try:
                await self._pause(pause_s, meanwhile)
            finally:
                self._waiting -= 1
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    async def _pause(self, pause_s: float, meanwhile: Callable[[], None]) -> None:
        until = time.monotonic() + pause_s
        while time.monotonic() < until or none_left():
            await asyncio.sleep(POLL_S)
            meanwhile()

    def check(self) -> None:
        """Notify the listener when a shortage begins or ends; call this often."""
        if none_left():
            self._short("nothing can be opened")
        elif self.problem is not None and not self._waiting:
            self.problem = None
            self._listener.descriptors_recovered("files and connections can be opened again")

    def _short(self, why: str) -> None:
        if self.problem is None:
            self.problem = (
                f"too many open files ({why}; the limit of this process is {limit()}): raise"
                " `LimitNOFILE` of the service, or `ulimit -n`, and close what holds many files;"
                " the node goes on by itself"
            )
            self._listener.descriptors_low(self.problem)
