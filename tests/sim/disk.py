"""What survives a crash: the durable state in the journal's encoding, and the files beside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import copy
from itertools import count
from pathlib import Path

from lightyear_node.protocol.durable_state import DurableState
from lightyear_node.storage.journal import Journal
from lightyear_node.types import Evidence, PeerName, SignedManifest, Update
from tests.support.journal_records import first_bad_record


class Disk:
    """Uses the journal's encoding without SQLite: fast enough for millions of steps."""

    def __init__(self) -> None:
        self.evidence: dict[PeerName, Evidence] = {}
        self.seen: tuple[SignedManifest, ...] = ()
        """The signed manifests of the updates that the site vouches for."""
        self.served: tuple[Update, ...] = ()
        """The site's last two updates."""
        self.fetched: dict[PeerName, Update] = {}
        self._memory = ""

    def read(self) -> DurableState | None:
        return DurableState.from_plain(json.loads(self._memory)) if self._memory else None

    def write(self, kind: str, memory: DurableState) -> DurableState:
        """Make the state durable; return what a restart would read."""
        self._memory = json.dumps(memory.to_plain())
        announced = memory.announced
        if announced is not None and announced not in self.served:
            self.served = (*self.served[-1:], announced)
        return DurableState.from_plain(json.loads(self._memory))

    def copy(self) -> Disk:
        """Return a backup."""
        disk = copy(self)
        disk.evidence, disk.fetched = dict(self.evidence), dict(self.fetched)
        return disk


class JournalDisk(Disk):
    """Uses the real journal: one transaction and one chained record per persistence point."""

    def __init__(self, path: Path, fresh: Callable[[], Path]) -> None:
        super().__init__()
        self.path = path
        self._fresh = fresh
        self._stamp = count(1)

    def read(self) -> DurableState | None:
        journal = Journal(self.path)
        remembered = journal.memory()
        journal.close()
        return DurableState.from_plain(remembered["barrier"]) if remembered else None

    def write(self, kind: str, memory: DurableState) -> DurableState:
        journal = Journal(self.path)
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

    def copy(self) -> Disk:
        disk = super().copy()
        assert isinstance(disk, JournalDisk)
        disk.path = self._fresh()
        if self.path.exists():
            shutil.copy(self.path, disk.path)
        return disk

    def first_bad_record(self) -> int | None:
        journal = Journal(self.path)
        try:
            return first_bad_record(journal)
        finally:
            journal.close()
