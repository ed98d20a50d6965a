"""Addresses where nobody answers, and what people are told about it."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import grpc
import grpc.aio
import pytest

from lightyear_node.errors import ConfigError, PeerRefusedUs, PeerUnreachable
from lightyear_node.records import PeerName
from lightyear_node.store import Store
from lightyear_node.transport.failures import explain
from lightyear_node.transport.server import ExchangeServer
from lightyear_node.transport.service import Service

from .sites import GRID, HELLO, MANIFEST, QUIET, A, B, FakeHost, calling, pins, serving


def test_a_port_in_use_is_said_so() -> None:
    async def scenario() -> None:
        async with serving(FakeHost()) as (_, address):
            host = FakeHost()
            second = ExchangeServer(A, pins(B), Service(host, Path()), host)
            with pytest.raises(ConfigError, match="in use") as caught:
                await second.start(address)
            assert caught.value.hint
            await second.stop()

    asyncio.run(scenario())


def test_a_port_where_nobody_listens_is_said_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))  # bound, but not listening
            address = f"127.0.0.1:{bound.getsockname()[1]}"
            async with calling(address) as client:
                with pytest.raises(PeerUnreachable, match=f"nothing listens at {address}"):
                    await client.hello(HELLO)
                with pytest.raises(PeerUnreachable, match="nothing listens"):
                    await client.fetch(MANIFEST, Store(tmp_path), GRID)

    asyncio.run(scenario())


def test_a_machine_that_takes_connections_and_is_silent_is_said_so() -> None:
    """Its kernel still answers while it is paused; nobody's certificate is to blame."""

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            async with calling(f"127.0.0.1:{silent.getsockname()[1]}") as client:
                with pytest.raises(PeerUnreachable):
                    await client.announce(QUIET)
                with pytest.raises(PeerUnreachable, match="takes our connections"):
                    await client.announce(QUIET)

    asyncio.run(scenario())


CONNECTING = "failed to connect to all addresses; last error: "


@pytest.mark.parametrize(
    ("said", "kind", "reason", "sentence"),
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
def test_every_failure_is_a_sentence(said: str, kind: type, reason: str, sentence: str) -> None:
    code, _, details = said.partition(": ")
    explained = explain(PeerName("site-a"), "x:1", grpc.StatusCode[code], details)
    assert type(explained) is kind
    assert explained.reason == reason
    assert sentence in str(explained)
