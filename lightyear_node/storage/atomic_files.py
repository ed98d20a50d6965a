"""Files that appear under their name whole or not at all.

Content is written to a temporary file in the same directory, then renamed.  A rename replaces the
old file in one step, so a reader sees the old content or the new.  It is durable only after the
directory was synced.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SUFFIX = ".part"
"""Appended to a file's name while it is being written."""


class UnsyncedRename(OSError):
    """The file was renamed, but the rename may not survive a power cut."""


@contextmanager
def staged(*targets: Path, suffix: str = SUFFIX) -> Iterator[list[Path]]:
    """Yield a temporary path for each target; rename them, in order, if the block succeeds.

    Temporary files that were not renamed are deleted.  Nothing is synced.
    """
    temporary = [path.with_name(path.name + suffix) for path in targets]
    try:
        yield temporary
        for source, target in zip(temporary, targets, strict=True):
            os.replace(source, target)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)


def write_file(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Replace the content of a file; with `durable`, sync it before it gets its name."""
    raw = content.encode() if isinstance(content, str) else content
    with staged(path) as [temporary], temporary.open("wb") as file:
        file.write(raw)
        file.flush()
        if durable:
            os.fsync(file.fileno())


@contextmanager
def staged_directory(target: Path) -> Iterator[Path]:
    """Yield a new private directory; it replaces `target`, durably, if the block succeeds."""
    temporary = target.with_name(target.name + ".new")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700)
    yield temporary
    sync(temporary)
    if target.exists():
        shutil.rmtree(target)
    os.rename(temporary, target)
    sync(target.parent)


def rename_durably(source: Path, target: Path) -> None:
    """Rename a synced file and sync the target's directory; raises `UnsyncedRename`.

    The directory is opened first: without a free file descriptor nothing is renamed.
    """
    fd = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        source.rename(target)
        try:
            os.fsync(fd)
        except OSError as problem:
            raise UnsyncedRename(*problem.args) from problem
    finally:
        os.close(fd)


def file_stamp(path: Path) -> tuple[int, ...] | None:
    """Changes whenever the file is replaced or rewritten; None if there is no readable file."""
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_ino, about.st_size, about.st_dev


def sync(path: Path) -> None:
    """Make a file's content, or the names in a directory, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
