"""Ends connections that gRPC has no way to end.

gRPC's server can only close all its connections or none, and a status for one call waits in line
behind whatever the caller does not read.  But the sockets are this process's own: shutting one
down ends every call on it at once, on both sides, as if the cable had been pulled.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Set
from urllib.parse import unquote

_DESCRIPTORS = "/dev/fd"
"""The open files of this process, on Linux and macOS alike."""


def hang_up(connections: Set[str]) -> None:
    """Shut down the connections from these remote ends, as gRPC names them: `ipv4:10.8.0.4:50312`.

    Where the system does not list open files, nothing is done.
    """
    if not connections:
        return
    ends = {unquote(connection) for connection in connections}
    with contextlib.suppress(OSError):
        for name in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):
                _hang_up_if(int(name), ends)


def _hang_up_if(descriptor: int, ends: Set[str]) -> None:
    # A copy of the descriptor: gRPC may close its own at any moment, and the number could then be
    # another file's.
    copy = os.dup(descriptor)
    if not stat.S_ISSOCK(os.fstat(copy).st_mode):
        os.close(copy)
        return
    with socket.socket(fileno=copy) as one:
        if _remote(one) in ends:
            one.shutdown(socket.SHUT_RDWR)


def _remote(one: socket.socket) -> str | None:
    """In gRPC's words; None for what is not an internet connection."""
    if one.type != socket.SOCK_STREAM or one.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    host, port = one.getpeername()[:2]
    if one.family == socket.AF_INET6 and host.startswith("::ffff:"):
        return f"ipv4:{host.removeprefix('::ffff:')}:{port}"
    return f"ipv6:[{host}]:{port}" if one.family == socket.AF_INET6 else f"ipv4:{host}:{port}"
