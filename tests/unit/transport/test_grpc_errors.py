"""Failed calls, and the error messages for them."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import grpc
import grpc.aio
import pytest

from lightyear_node.errors import ConfigError, PeerRefusedUs, PeerUnreachable
from lightyear_node.storage.blobs import BlobStore
from lightyear_node.transport.grpc_errors import to_peer_error
from lightyear_node.transport.handlers import Handlers
from lightyear_node.transport.server import ExchangeServer
from lightyear_node.types import PeerName
from tests.support.tls_sites import (
    GRID,
    HELLO,
    MANIFEST,
    QUIET,
    A,
    B,
    FakeHost,
    calling,
    pins,
    serving,
)


def test_a_port_in_use_is_reported() -> None:
    async def scenario() -> None:
        async with serving(FakeHost()) as (_, address):
            host = FakeHost()
            second = ExchangeServer(A, pins(B), Handlers(host, Path()), host)
            with pytest.raises(ConfigError, match="in use") as caught:
                await second.start(address)
            assert caught.value.hint
            await second.stop()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_port_without_a_listener_is_reported(tmp_path: Path) -> None:
    async def scenario() -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))  # bound, but not listening
            address = f"127.0.0.1:{bound.getsockname()[1]}"
            async with calling(address) as client:
                with pytest.raises(PeerUnreachable, match=f"nothing listens at {address}"):
                    await client.hello(HELLO)
                with pytest.raises(PeerUnreachable, match="nothing listens"):
                    await client.fetch(MANIFEST, BlobStore(tmp_path), GRID)

    asyncio.run(scenario())


def test_a_machine_that_accepts_connections_but_sends_nothing_is_reported() -> None:
    """The kernel of a paused machine still accepts connections; certificates are not mentioned."""

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            async with calling(f"127.0.0.1:{silent.getsockname()[1]}") as client:
                with pytest.raises(PeerUnreachable):
                    await client.announce(QUIET)
                with pytest.raises(PeerUnreachable, match="accepts our connections"):
                    await client.announce(QUIET)

    asyncio.run(scenario())


CONNECTING = "failed to connect to all addresses; last error: "


@pytest.mark.parametrize(
    ("status", "kind", "reason", "message"),
    [
        (
            "UNAVAILABLE: DNS resolution failed for x:1: not found",
            PeerUnreachable, "unreachable", "cannot be resolved",
        ),
        (
            "UNAVAILABLE: errors resolving x:1: [Domain name not found]",
            PeerUnreachable, "unreachable", "cannot be resolved",
        ),
        (
            f"UNAVAILABLE: {CONNECTING}Socket closed",
            PeerUnreachable, "unreachable", "handshake",
        ),
        ("UNAVAILABLE: Socket closed", PeerUnreachable, "unreachable", "x:1 broke"),
        ("UNAVAILABLE: {0} {x!r} %s", PeerUnreachable, "unreachable", "x:1 broke"),
        ("DEADLINE_EXCEEDED: Deadline Exceeded", PeerUnreachable, "timeout", "x:1"),
        ("UNIMPLEMENTED: Method not found!", PeerRefusedUs, "malformed", "version"),
        ("NOT_FOUND: not_offered", PeerUnreachable, "stale_round", "no longer"),
        (
            "FAILED_PRECONDITION: schema_mismatch: other tensors",
            PeerRefusedUs, "schema_mismatch", "refuses us: other tensors",
        ),
        ("INTERNAL: internal error", PeerUnreachable, "unreachable", "internal"),
    ],
)  # fmt: skip
def test_every_status_has_a_message(status: str, kind: type, reason: str, message: str) -> None:
    code, _, details = status.partition(": ")
    error = to_peer_error(PeerName("site-a"), "x:1", grpc.StatusCode[code], details)
    assert type(error) is kind
    assert error.reason == reason
    assert message in str(error)
