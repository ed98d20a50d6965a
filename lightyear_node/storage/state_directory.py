"""The state directory of a node: lock, journal and weights files.

LOCK, journal.db, journal-000001.db …, updates/, models/, carry/
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Set
from pathlib import Path
from typing import TextIO

from lightyear_node.errors import AlreadyRunning, StoreError
from lightyear_node.storage.blobs import BlobStore
from lightyear_node.storage.file_descriptors import shortage
from lightyear_node.storage.journal import Journal
from lightyear_node.types import Digest


class StateDirectory:
    """The state directory of a running node; only one process may have it open."""

    def __init__(self, directory: Path, *, recovered: bool = False) -> None:
        """`recovered`: the operator states that the journal may lack its newest records."""
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as problem:
            unmade = StoreError(
                f"{directory}: cannot be made: {problem.strerror}",
                hint="check the owner and mode of the folder above",
            )
            raise shortage(directory, problem) or unmade from None
        self.directory = directory
        with contextlib.ExitStack() as undo:
            self._lock = undo.enter_context(_lock(directory / "LOCK"))
            self.journal = Journal(directory / "journal.db", recovered=recovered)
            undo.callback(self.journal.close)
            self.updates = BlobStore(directory / "updates")
            self.models = BlobStore(directory / "models", suffix=".safetensors")
            self.carry = BlobStore(directory / "carry")
            for store in (self.updates, self.models, self.carry):
                store.clear_scratch()
            undo.pop_all()

    def check(self, store: BlobStore, *digests: Digest) -> None:
        """Raise `StoreError` unless these files are complete and undamaged."""
        for digest in digests:
            if not store.verify(digest):
                raise StoreError(
                    f"{store.path(digest)} is missing or damaged",
                    hint="restore it from a backup, or move the state directory away to start over",
                )

    def retain(self, *, updates: Set[Digest], models: Set[Digest], carry: Set[Digest]) -> None:
        """Delete all other files."""
        self.updates.retain(updates)
        self.models.retain(models)
        self.carry.retain(carry)

    def close(self) -> None:
        self.journal.close()
        self._lock.close()


def _lock(path: Path) -> TextIO:
    try:
        # Not through a link: its target would be truncated.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
    except OSError as problem:
        if path.is_symlink():
            raise StoreError(
                f"{path} is a symbolic link",
                hint=f"delete it, unless another program needs it: rm {path}",
            ) from None
        raise _unwritable(path, problem) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StoreError(f"{path} is not a file", hint=f"delete it: rm {path}")
    file = os.fdopen(fd, "r+")
    try:
        # The kernel releases the lock when the process ends for any reason.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read(32).strip()
        file.close()
        raise AlreadyRunning(
            f"another node (process {owner or 'unknown'}) is running on {path.parent}",
            hint="stop it first, or give this one its own home directory",
        ) from None
    try:
        file.seek(0)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
    except OSError as problem:
        with contextlib.suppress(OSError):  # flushing fails again
            file.close()
        raise _unwritable(path, problem) from None
    return file


def _unwritable(path: Path, problem: OSError) -> StoreError:
    return shortage(path, problem) or StoreError(
        f"{path}: cannot be written: {problem.strerror}",
        hint="the node needs to write its state directory: check owner, mode and disk",
    )
