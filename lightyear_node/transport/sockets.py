"""Lists and closes single TCP connections of this process, which gRPC cannot do.

gRPC's server closes all its connections or none, and the status of a call is queued behind
whatever the client does not read.  But the sockets belong to this process: shutting one down ends
every call on it at once, on both sides.

Needs no new file descriptor, so that it works when none is left.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterable, Set
from urllib.parse import unquote

from lightyear_node.storage import file_descriptors

_OPEN_FILES = "/dev/fd"
"""The open files of this process, on Linux and macOS."""
_DESCRIPTORS_MAX = 1 << 16
"""Numbers tried where the system cannot list them, possibly for lack of a descriptor."""

_PLACEHOLDER = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
_COPY = os.dup(_PLACEHOLDER)
"""Reserved, so that a socket can be duplicated onto it at any time."""
_copying = threading.Lock()


def normalized(connection: str) -> str:
    """A remote end in one notation: gRPC escapes some characters of IPv6 addresses, as in %5B."""
    return unquote(connection)


def close_connections(connections: Set[str]) -> None:
    """Shut down the connections from these remote ends, in gRPC's notation `ipv4:10.8.0.4:50312`.

    Does nothing where the system does not list open files.
    """
    if not connections:
        return
    ends = {normalized(connection) for connection in connections}
    for descriptor in _descriptors():
        with contextlib.suppress(OSError):
            if _remote_end(descriptor) in ends:
                _shut_down_if(descriptor, ends)


def list_connections(port: int) -> set[str]:
    """The remote ends of all connections to a local port."""
    found = set()
    for descriptor in _descriptors():
        with contextlib.suppress(OSError):
            remote = _remote_end(descriptor, port)
            if remote is not None:
                found.add(remote)
    return found


def _descriptors() -> Iterable[int]:
    try:
        return [int(name) for name in os.listdir(_OPEN_FILES)]
    except OSError:
        return range(min(file_descriptors.limit(), _DESCRIPTORS_MAX))


def _shut_down_if(descriptor: int, ends: Set[str]) -> None:
    # On a copy: gRPC may close its own descriptor at any moment, and the number may then belong to
    # another file.
    with _copying:
        os.dup2(descriptor, _COPY, inheritable=False)
        try:
            if _remote_end(_COPY) in ends:
                copy = socket.socket(fileno=_COPY)
                try:
                    copy.shutdown(socket.SHUT_RDWR)
                finally:
                    copy.detach()
        finally:
            os.dup2(_PLACEHOLDER, _COPY, inheritable=False)


def _remote_end(descriptor: int, port: int | None = None) -> str | None:
    """In gRPC's notation; None if it is no TCP connection, or none to this local port."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return None
    connection = socket.socket(fileno=descriptor)
    try:
        tcp = connection.type == socket.SOCK_STREAM
        if not tcp or connection.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        if port is not None and connection.getsockname()[1] != port:
            return None
        host, remote_port = connection.getpeername()[:2]
    finally:
        connection.detach()  # gRPC closes it
    if connection.family == socket.AF_INET6 and host.startswith("::ffff:"):
        return f"ipv4:{host.removeprefix('::ffff:')}:{remote_port}"
    if connection.family == socket.AF_INET6:
        return f"ipv6:[{host}]:{remote_port}"
    return f"ipv4:{host}:{remote_port}"
