"""Ends a connection that gRPC would keep.

gRPC has no way to close one peer's connection: a withdrawn pin does not end it, and the status of a
call that is given up waits behind the bytes that a stalled reader does not take.  The socket itself
can be shut down, by which gRPC learns that the connection is gone, and all its calls with it.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
from urllib.parse import unquote

_PEER = re.compile(r"ipv[46]:\[?([^\]]+?)\]?:(\d+)")


def cut(connection: str) -> bool:
    """Shut down the connection that gRPC calls by this name; False if there is none such."""
    match = _PEER.fullmatch(unquote(connection))
    if match is None:
        return False
    remote = (_plain(match[1]), int(match[2]))
    return any(_shut_down(fd, remote) for fd in _descriptors())


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/dev/fd")]
    except OSError:  # not a system that shows them: then calls are refused one by one
        return []


def _shut_down(fd: int, remote: tuple[str, int]) -> bool:
    """What is examined is what is shut down: a copy, whatever happens to the original meanwhile."""
    try:
        own = os.dup(fd)
    except OSError:
        return False
    if not stat.S_ISSOCK(os.fstat(own).st_mode):
        os.close(own)
        return False
    with socket.socket(fileno=own) as line:
        if line.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        try:
            host, port, *_ = line.getpeername()
            if (_plain(host), port) != remote:
                return False
            line.shutdown(socket.SHUT_RDWR)
        except OSError:  # it listens, or was closed by its other end
            return False
    return True


def _plain(host: str) -> str:
    """One spelling for an address, also where IPv4 comes in over a socket that takes both."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
