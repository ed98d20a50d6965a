"""Finds the peers whose files make a job fail, so that the job can run without them.

Pure: a generator that yields sets of peers to try and is sent the result of each.  The worker tries
them in its own process, for files that raise; the daemon in new processes, for files that crash or
hang the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

P = TypeVar("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class TriedFiles(Generic[P, R]):
    result: R | None
    """Result for the largest set that worked; None if the job fails without any peer."""
    culprits: tuple[P, ...] = ()
    """Peers with which alone the job fails."""
    unclear: tuple[P, ...] = ()
    """Peers that had to be left out although none of them alone is the cause."""
    job_at_fault: bool = False
    """Whether no set of peers worked and no peer is the cause: the job itself fails."""


Trials = Generator[tuple[P, ...], R | None, TriedFiles[P, R]]


def trials(peers: Sequence[P]) -> Trials[P, R]:
    """Yields sets of peers; is sent the job's result for each, or None if it failed.

    First all peers, which nearly always works.  If that fails, none: a job that fails without any
    peer is our own failure.  Then each alone, then all that work alone, then all of these but one.
    If none of several peers works alone, no peer is the cause: the job may need more than one.
    """
    every_peer = tuple(peers)
    result = yield every_peer
    if result is not None or not every_peer:
        return TriedFiles(result, job_at_fault=result is None)
    without_peers = yield ()
    if without_peers is None:
        return TriedFiles(None, job_at_fault=True)
    working: tuple[P, ...] = ()
    for peer in every_peer:
        if (yield (peer,)) is not None:
            working += (peer,)
    if not working:
        working = every_peer if len(every_peer) > 1 else ()
    culprits = tuple(peer for peer in every_peer if peer not in working)
    result = (yield working) if working else without_peers
    if result is not None:
        return TriedFiles(result, culprits)
    for peer in working:
        result = yield tuple(other for other in working if other != peer)
        if result is not None:
            return TriedFiles(result, culprits, (peer,))
    return TriedFiles(without_peers, culprits, working, job_at_fault=working == every_peer)


def tried(peers: Sequence[P], attempt: Callable[[Sequence[P]], R | None]) -> TriedFiles[P, R]:
    """Run the trials; `attempt` returns None if the job fails."""
    sets: Trials[P, R] = trials(peers)
    subset = next(sets)
    while True:
        try:
            subset = sets.send(attempt(subset))
        except StopIteration as end:
            found: TriedFiles[P, R] = end.value
            return found
