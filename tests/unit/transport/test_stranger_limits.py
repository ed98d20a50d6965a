"""Beyond the limits the oldest unauthenticated connections are closed, but never a peer's."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator

import pytest

from lightyear_node.storage.file_descriptors import (
    OURS,
    PER_PEER,
    PER_PEER_CONNECTIONS,
    STRANGERS_MAX,
    STRANGERS_MIN,
    ConnectionShare,
    too_few,
)
from lightyear_node.transport.limits import STRANGERS_BURST
from lightyear_node.transport.stranger_limits import StrangerLimits
from tests.support.descriptor_exhaustion import no_descriptors

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux has many loopback addresses"
)

SHARE = ConnectionShare(connections=1000, strangers=24)
PER_ADDRESS = 6


class Port:
    """A listening port, with both ends of the connections to it."""

    def __init__(self, opened: contextlib.ExitStack) -> None:
        self._opened = opened
        self._server = opened.enter_context(socket.create_server(("0.0.0.0", 0), backlog=256))
        self.strangers = StrangerLimits()
        self.strangers.set_limits(SHARE, peers=1)
        self.strangers.set_port(self._server.getsockname()[1])

    def connect(self, host: str = "127.0.0.2", port: int = 0) -> socket.socket:
        client = self._opened.enter_context(socket.socket())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        client.bind((host, port))
        client.connect(("127.0.0.1", self._server.getsockname()[1]))
        self._opened.enter_context(self._server.accept()[0])
        self.strangers.connection_opened()
        return client


@pytest.fixture
def port() -> Iterator[Port]:
    with contextlib.ExitStack() as opened:
        yield Port(opened)


def name(client: socket.socket) -> str:
    host, port = client.getsockname()
    return f"ipv4:{host}:{port}"


def alive(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True


def test_the_oldest_connections_of_one_address_are_closed(port: Port) -> None:
    others = [port.connect("127.0.0.3") for _ in range(PER_ADDRESS)]
    clients = []
    for _ in range(2 * PER_ADDRESS):
        clients.append(port.connect())
        port.strangers.enforce()
    assert [alive(client) for client in clients] == [False] * PER_ADDRESS + [True] * PER_ADDRESS
    assert all(alive(client) for client in others)
    assert port.strangers.take_closed() == PER_ADDRESS
    assert port.strangers.take_closed() == 0


def test_the_oldest_connections_of_all_addresses_are_closed(port: Port) -> None:
    clients = []
    for number in range(2 * SHARE.strangers):
        clients.append(port.connect(f"127.0.1.{number + 1}"))
        port.strangers.enforce()
    half = [False] * SHARE.strangers + [True] * SHARE.strangers
    assert [alive(client) for client in clients] == half


def test_a_connection_with_a_call_is_never_closed(port: Port) -> None:
    peers = [port.connect() for _ in range(PER_ADDRESS)]
    for one in peers:
        port.strangers.call_received(name(one))
    for _ in range(5 * PER_ADDRESS):
        port.connect()
        port.strangers.enforce()
    assert all(alive(client) for client in peers)
    # The connection of a removed peer is unauthenticated again.
    port.strangers.forget([name(peers[0])])
    for _ in range(PER_ADDRESS + 1):
        port.connect()
        port.strangers.enforce()
    assert not alive(peers[0])
    assert all(alive(client) for client in peers[1:])


def test_a_new_connection_from_a_former_peers_port_is_unauthenticated(port: Port) -> None:
    """An address and port are known only while their connection lasts."""
    peer = port.connect("127.0.0.4")
    port.strangers.call_received(name(peer))
    _, number = peer.getsockname()
    port.strangers.enforce()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    peer.close()
    port.connect()
    port.strangers.enforce()
    stranger = port.connect("127.0.0.4", number)
    port.strangers.enforce()
    for _ in range(PER_ADDRESS):
        port.connect("127.0.0.4")
    port.strangers.enforce()
    assert not alive(stranger)


def test_a_burst_is_checked_at_once(port: Port) -> None:
    """By gRPC's own threads, since the event loop may be busy."""
    clients = [port.connect() for _ in range(10 * STRANGERS_BURST)]
    assert sum(not alive(client) for client in clients) >= STRANGERS_BURST - PER_ADDRESS


def test_closing_needs_no_file_descriptor(port: Port) -> None:
    clients = [port.connect() for _ in range(STRANGERS_BURST - 1)]
    with no_descriptors():
        port.strangers.enforce()
    assert sum(alive(client) for client in clients) == PER_ADDRESS


@pytest.mark.parametrize("limit", [256, 1024, 8192, 1 << 20])
@pytest.mark.parametrize("peers", [1, 7, 63])
def test_descriptors_for_peers_are_reserved(limit: int, peers: int) -> None:
    share = ConnectionShare.of(limit, peers)
    assert STRANGERS_MIN <= share.strangers <= STRANGERS_MAX
    assert share.strangers + PER_PEER_CONNECTIONS * peers < share.connections
    fits = share.connections + OURS + PER_PEER * peers <= limit
    assert fits is (too_few(limit, peers) is None)
