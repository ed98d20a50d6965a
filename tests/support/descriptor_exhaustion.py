"""Uses up the file descriptors of this process."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

from lightyear_node.storage.file_descriptors import none_left


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """No file can be opened inside this context."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    # Lower the limit first, so that few files are needed; not to the highest number in use, which
    # could not be used again after it was closed.
    highest = max(map(int, os.listdir("/dev/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, usual[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        assert none_left()
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        for descriptor in held:
            os.close(descriptor)
