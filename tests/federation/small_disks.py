"""File systems so small that a test can fill them; only root can make them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from needs import need


@contextlib.contextmanager
def small_disk(folder: Path, size_mib: int) -> Iterator[None]:
    """A file system of its own at `folder`, gone afterwards."""
    need(None if os.geteuid() == 0 else "only root can mount a file system")
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={size_mib}m,mode=0700"
    command = ["mount", "-t", "tmpfs", "-o", options, "lightyear-test", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    need(None if mounted.returncode == 0 else f"mount: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        # Lazily: a node that is just ending may still have a file open.
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, leaving_bytes: int = 0) -> Path:
    """Put a file there that takes all, or nearly all, that is free; returns it."""
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
