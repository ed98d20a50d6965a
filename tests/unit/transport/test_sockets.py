"""Closing one connection by its remote end, for all kinds of addresses."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import quote

import pytest

from lightyear_node.transport.sockets import close_connections

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def connect(sockets: ExitStack, listen: str, call: str, *, dual: bool = False) -> Pair:
    """The server's and the client's end of a new connection."""
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    try:
        server = sockets.enter_context(
            socket.create_server((listen, 0), family=family, dualstack_ipv6=dual)
        )
    except (OSError, ValueError):
        pytest.skip("this machine has no IPv6")
    client = sockets.enter_context(
        socket.create_connection((call, server.getsockname()[1]), timeout=20)
    )
    accepted = sockets.enter_context(server.accept()[0])
    return accepted, client


@pytest.mark.parametrize(
    ("listen", "call", "dual", "name"),
    [
        ("127.0.0.1", "127.0.0.1", False, "ipv4:127.0.0.1"),
        ("::1", "::1", False, "ipv6:" + quote("[::1]", safe=":")),
        ("::", "127.0.0.1", True, "ipv4:127.0.0.1"),
    ],
    ids=["IPv4", "IPv6", "IPv4 on a dual-stack port"],
)
def test_only_the_given_connection_is_closed(
    sockets: ExitStack, listen: str, call: str, dual: bool, name: str
) -> None:
    _, client = connect(sockets, listen, call, dual=dual)
    other_server, other_client = connect(sockets, listen, call, dual=dual)
    open_files = os.listdir("/dev/fd")
    close_connections({f"{name}:{client.getsockname()[1]}"})
    assert os.listdir("/dev/fd") == open_files
    assert client.recv(1) == b""
    other_client.sendall(b"x")
    assert other_server.recv(1) == b"x"


def test_unknown_connections_are_ignored() -> None:
    close_connections(set())
    close_connections({"ipv4:127.0.0.1:1", "unix:", "nonsense%zz"})
