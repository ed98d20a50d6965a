"""One connection is ended by its socket, whatever kind of address it comes from; no other is."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import quote

import pytest

from lightyear_node.transport.hanging_up import hang_up

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def connect(sockets: ExitStack, listen: str, call: str, *, dual: bool = False) -> Pair:
    """The accepted end of a new connection, and the calling one."""
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    try:
        server = sockets.enter_context(
            socket.create_server((listen, 0), family=family, dualstack_ipv6=dual)
        )
    except (OSError, ValueError):
        pytest.skip("this machine has no IPv6")
    caller = sockets.enter_context(
        socket.create_connection((call, server.getsockname()[1]), timeout=20)
    )
    accepted = sockets.enter_context(server.accept()[0])
    return accepted, caller


@pytest.mark.parametrize(
    ("listen", "call", "dual", "name"),
    [
        ("127.0.0.1", "127.0.0.1", False, "ipv4:127.0.0.1"),
        ("::1", "::1", False, "ipv6:" + quote("[::1]", safe=":")),
        ("::", "127.0.0.1", True, "ipv4:127.0.0.1"),
    ],
    ids=["v4", "v6", "v4 on a port for both"],
)
def test_the_named_connection_ends_and_no_other(
    sockets: ExitStack, listen: str, call: str, dual: bool, name: str
) -> None:
    _, caller = connect(sockets, listen, call, dual=dual)
    bystander, other = connect(sockets, listen, call, dual=dual)
    open_files = os.listdir("/dev/fd")
    hang_up({f"{name}:{caller.getsockname()[1]}"})
    assert os.listdir("/dev/fd") == open_files
    assert caller.recv(1) == b""
    other.sendall(b"x")
    assert bystander.recv(1) == b"x"


def test_a_connection_that_is_gone_already_is_no_problem() -> None:
    hang_up(set())
    hang_up({"ipv4:127.0.0.1:1", "unix:", "nonsense%zz"})
