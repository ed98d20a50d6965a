"""Small file systems that a test can fill; root only."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.needs import need, need_tool


@contextlib.contextmanager
def small_disk(folder: Path, size_mib: int) -> Iterator[None]:
    """Mount a tmpfs at `folder` inside this context."""
    need(None if os.geteuid() == 0 else "only root can mount a file system")
    need_tool("mount", "umount")
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={size_mib}m,mode=0700"
    command = ["mount", "-t", "tmpfs", "-o", options, "lightyear-test", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    need(None if mounted.returncode == 0 else f"mount: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        # Lazily: a node that is stopping may still have a file open.
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, leaving_bytes: int = 0) -> Path:
    """Fill a folder's file system with one file, up to `leaving_bytes`; returns the file."""
    junk = folder / "junk"
    with junk.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while free(folder) > leaving_bytes:
                    file.write(b"\0" * size)
    return junk


def free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
