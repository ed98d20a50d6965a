"""Files that only their owner may read or replace: keys and tokens."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from lightyear_node.errors import ConfigError

FILE_BYTES_MAX = 8192
"""Keys, certificates and tokens are far shorter; the rest of a longer file is not read."""


def read_checked(
    path: Path,
    *,
    private: bool,
    missing: str = "run `lightyear-node init` to make this site's keys",
) -> bytes:
    """Read a file; a private one is refused if another user could have read or placed it.

    `missing` is the hint if the file does not exist.
    """
    try:
        # The checks use the open file: a path could be swapped between check and use.  Without
        # O_NONBLOCK, a pipe in place of a key would block the start.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if private else 0)
        fd = os.open(path, flags)
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing", hint=missing) from None
    except OSError as error:
        if path.is_symlink():
            raise ConfigError(
                f"{path} is a symbolic link",
                hint=f"put the file itself there, then chmod 600 {path}",
            ) from None
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    with open(fd, "rb") as file:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{path} is not a file")
        if private and mode & 0o077:
            raise ConfigError(
                f"{path} can be read by others (mode {stat.S_IMODE(mode):04o})",
                hint=f"chmod 600 {path}",
            )
        return file.read(FILE_BYTES_MAX)


def write_private(path: Path, content: bytes) -> None:
    """Create a file that only the owner may read; durable when this returns."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(fd)
