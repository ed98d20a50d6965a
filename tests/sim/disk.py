"""What survives a process: a site's memory as the journal encodes it, and the files beside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import copy
from itertools import count
from pathlib import Path

from lightyear_node.barrier import Memory
from lightyear_node.journal import Journal
from lightyear_node.records import PeerName, Update

Proof = tuple[Update, Update]


class Disk:
    """The journal's encoding without the journal: fast enough for millions of steps."""

    def __init__(self) -> None:
        self.evidence: dict[PeerName, Proof] = {}
        self.served: tuple[Update, ...] = ()
        """Our two last updates."""
        self.fetched: dict[PeerName, Update] = {}
        self._memory = ""

    def read(self) -> Memory | None:
        return Memory.from_plain(json.loads(self._memory)) if self._memory else None

    def write(self, kind: str, memory: Memory) -> Memory:
        """Returns what a restart would read."""
        self._memory = json.dumps(memory.to_plain())
        announced = memory.announced
        if announced is not None and announced not in self.served:
            self.served = (*self.served[-1:], announced)
        return Memory.from_plain(json.loads(self._memory))

    def copied(self) -> Disk:
        """A backup."""
        disk = copy(self)
        disk.evidence, disk.fetched = dict(self.evidence), dict(self.fetched)
        return disk


class JournalDisk(Disk):
    """The real journal: SQLite, one transaction and one chained record per persistence point."""

    def __init__(self, path: Path, fresh: Callable[[], Path]) -> None:
        super().__init__()
        self._path = path
        self._fresh = fresh
        self._stamp = count(1)

    def read(self) -> Memory | None:
        journal = Journal(self._path)
        remembered = journal.memory()
        journal.close()
        return Memory.from_plain(remembered["barrier"]) if remembered else None

    def write(self, kind: str, memory: Memory) -> Memory:
        journal = Journal(self._path)
        stamp = next(self._stamp)
        journal.append(
            kind,
            {"point": kind},
            wall_ns=stamp,
            lamport=stamp,
            round=memory.round,
            remember={"barrier": memory.to_plain()},
        )
        journal.close()
        return super().write(kind, memory)

    def copied(self) -> Disk:
        disk = super().copied()
        assert isinstance(disk, JournalDisk)
        disk._path = self._fresh()
        if self._path.exists():
            shutil.copy(self._path, disk._path)
        return disk

    def first_bad_record(self) -> int | None:
        journal = Journal(self._path)
        try:
            return journal.first_bad_record()
        finally:
            journal.close()
