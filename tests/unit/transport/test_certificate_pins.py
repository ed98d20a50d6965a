"""Only pinned certificates are accepted, by server and client, over real TLS."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from lightyear_node.errors import ConfigError, PeerError, PeerRefusedUs, PeerUnreachable
from lightyear_node.identity.keys import Identity
from lightyear_node.storage.blobs import BlobStore
from lightyear_node.transport.channel import DirectChannel
from lightyear_node.transport.client import PeerClient
from lightyear_node.transport.handlers import Handlers
from lightyear_node.transport.handshake_counter import HandshakeCounter
from lightyear_node.transport.reverse_calls import ReverseStreams
from lightyear_node.transport.server import AuthenticatedCalls, ExchangeServer
from lightyear_node.transport.stranger_limits import StrangerLimits
from lightyear_node.types import PeerName, Reason
from lightyear_node.v1 import exchange_pb2 as pb
from lightyear_node.v1 import exchange_pb2_grpc
from tests.support.tls_sites import (
    A_RENEWED,
    ANNOUNCED,
    B_EXPIRED,
    B_RENEWED,
    DIGEST,
    GRID,
    HELLO,
    MANIFEST,
    QUIET,
    STRANGER,
    A,
    B,
    C,
    FakeHost,
    calling,
    offering,
    pins,
    raw_stub,
    serving,
    status_of,
)


async def outcome(call: Awaitable[object]) -> PeerError | None:
    try:
        await call
    except PeerError as problem:
        return problem
    return None


# -- Pinned peers ---------------------------------------------------------------------------------


def test_pinned_peers_greet_and_announce() -> None:
    async def scenario() -> None:
        host = FakeHost()
        host.answer = lambda peer, sent: dataclasses.replace(sent, lamport=sent.lamport + 1)
        async with (
            serving(host) as (_, address),
            calling(address, B) as b,
            calling(address, C) as c,
        ):
            assert (await b.hello(HELLO)) == dataclasses.replace(HELLO, lamport=13)
            assert (await c.announce(ANNOUNCED)) == dataclasses.replace(ANNOUNCED, lamport=4)
            assert (await c.announce(QUIET)).latest is None
        assert host.calls == [("site-b", HELLO), ("site-c", ANNOUNCED), ("site-c", QUIET)]
        assert host.denials == []

    asyncio.run(scenario())


def test_a_renewing_peer_may_call_with_either_certificate() -> None:
    async def scenario() -> None:
        for order in ((B, B_RENEWED), (B_RENEWED, B)):
            host = FakeHost()
            async with serving(host, peers=order) as (_, address):
                for identity in (B, B_RENEWED):
                    async with calling(address, identity) as client:
                        await client.hello(HELLO)
            assert [peer for peer, _ in host.calls] == ["site-b", "site-b"]

    asyncio.run(scenario())


def test_a_renewing_peer_may_be_called_with_either_certificate() -> None:
    async def scenario() -> None:
        for identity in (A, A_RENEWED):
            async with serving(FakeHost(), identity) as (_, address):
                for order in ((A, A_RENEWED), (A_RENEWED, A)):
                    async with calling(address, pinned=order) as client:
                        await client.hello(HELLO)

    asyncio.run(scenario())


def test_pins_are_replaced_without_restart() -> None:
    async def scenario() -> None:
        host = FakeHost()
        async with serving(host, peers=(B,)) as (server, address), calling(address, B) as old:
            await old.hello(HELLO)
            server.set_credentials(A, pins(C))
            # Its connection is closed, and a new one is refused.
            with pytest.raises(PeerUnreachable):
                await old.hello(HELLO)
            async with calling(address, C) as new:
                await new.hello(HELLO)
            async with calling(address, B) as again:
                with pytest.raises(PeerUnreachable):
                    await again.hello(HELLO)
        assert [peer for peer, _ in host.calls] == ["site-b", "site-c"]

    asyncio.run(scenario())


def test_a_connection_that_outlives_its_pin_is_refused_at_every_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the connection cannot be closed, because the system does not list open files."""
    monkeypatch.setattr(
        "lightyear_node.transport.server.close_connections", lambda connections: None
    )

    async def scenario() -> None:
        host = FakeHost()
        async with serving(host, peers=(B,)) as (server, address), calling(address, B) as old:
            await old.hello(HELLO)
            server.set_credentials(A, pins(C))
            with pytest.raises(PeerRefusedUs, match=r"not in their peers\.yaml") as caught:
                await old.hello(HELLO)
            assert caught.value.reason is Reason.IDENTITY
            assert host.denials == [("unknown_peer", None)]

    asyncio.run(scenario())


def test_our_own_certificate_is_renewed_without_restart() -> None:
    async def scenario() -> None:
        async with (
            serving(FakeHost()) as (server, address),
            calling(address, pinned=(A,)) as old,
            calling(address, pinned=(A_RENEWED,)) as new,
        ):
            await old.hello(HELLO)
            server.set_credentials(A_RENEWED, pins(B, C))
            await old.hello(HELLO)  # an open connection is kept
            await new.hello(HELLO)

    asyncio.run(scenario())


@pytest.mark.parametrize("left", [(B, C), (C,), ()], ids=["its other pin", "others", "none"])
def test_withdrawing_a_pin_ends_a_stalled_stream_at_once(
    tmp_path: Path, left: tuple[Identity, ...]
) -> None:
    async def scenario() -> None:
        host = FakeHost(offering(tmp_path / "offered"))
        request = pb.FetchRequest(digest=bytes.fromhex(DIGEST))
        async with (
            serving(host, peers=(B_RENEWED, B, C)) as (server, address),
            raw_stub(address, C) as bystander,
            raw_stub(address, B_RENEWED) as stub,
        ):
            unaffected, stalled = bystander.Fetch(request), stub.Fetch(request)
            for call in (unaffected, stalled):
                await call.read()
            server.set_credentials(A, pins(*left))
            async with asyncio.timeout(1):
                assert await stalled.code() is grpc.StatusCode.UNAVAILABLE
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Hello(pb.Greeting())
            if left:
                assert await status_of(unaffected) is grpc.StatusCode.OK
        assert len(host.transfers) == len(left[-1:])

    asyncio.run(scenario())


def test_closing_a_client_interrupts_a_fetch_after_its_grace_period(tmp_path: Path) -> None:
    async def scenario(grace_s: float) -> None:
        host, store = FakeHost(offering(tmp_path / "offered")), BlobStore(tmp_path / f"{grace_s}")
        host.gates["offer"] = asyncio.Event()
        async with serving(host) as (_, address), asyncio.TaskGroup() as tasks:
            client = PeerClient(A.name, DirectChannel(A.name, address, [A.certificate], B))
            fetch = tasks.create_task(outcome(client.fetch(MANIFEST, store, GRID)))
            await host.until(lambda: bool(host.calls))
            closing = tasks.create_task(client.close(grace_s))
            if not grace_s:
                await closing
            host.gates["offer"].set()
            problem = await fetch
            await closing
            assert store.has(MANIFEST.update.digest) is (grace_s > 0)
            assert (problem is None) is (grace_s > 0)
            assert grace_s or isinstance(problem, PeerUnreachable)
            with pytest.raises(PeerUnreachable):
                await client.hello(HELLO)

    for grace_s in (0.0, 20.0):
        asyncio.run(scenario(grace_s))


def test_a_server_without_pins_refuses_to_start() -> None:
    with pytest.raises(ConfigError, match="no peer"):
        ExchangeServer(A, {}, Handlers(FakeHost(), Path()), FakeHost())


# -- Other certificates ---------------------------------------------------------------------------


def test_strangers_are_refused_in_the_handshake() -> None:
    async def scenario() -> None:
        host = FakeHost()
        async with serving(host) as (_, address):
            # The right name, in a certificate that is not pinned.
            async with calling(address, STRANGER) as stranger:
                with pytest.raises(PeerUnreachable, match="is our certificate in their peers"):
                    await stranger.hello(HELLO)
            async with raw_stub(address, identity=None) as anonymous:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await anonymous.Hello(pb.Greeting(), timeout=5)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            async with grpc.aio.insecure_channel(address) as channel:
                plaintext = exchange_pb2_grpc.ExchangeStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await plaintext.Hello(pb.Greeting(), timeout=5)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert host.calls == []

    asyncio.run(scenario())


def test_an_expired_certificate_is_refused_on_either_side() -> None:
    async def scenario() -> None:
        host = FakeHost()
        async with (
            serving(host, A, peers=(B_EXPIRED, C)) as (_, address),
            calling(address, B_EXPIRED) as client,
        ):
            with pytest.raises(PeerUnreachable, match="handshake"):
                await client.hello(HELLO)
        async with (
            serving(host, B_EXPIRED, peers=(A,)) as (_, address),
            calling(address, A, pinned=(B_EXPIRED,)) as client,
        ):
            with pytest.raises(PeerUnreachable, match="has expired"):
                await client.hello(HELLO)
        assert host.calls == []

    asyncio.run(scenario())


@pytest.mark.parametrize("impostor", [STRANGER, A_RENEWED, C])
def test_a_server_with_another_certificate_is_not_called(impostor: Any) -> None:
    async def scenario() -> None:
        host = FakeHost()
        async with serving(host, impostor) as (_, address), calling(address, pinned=(A,)) as b:
            with pytest.raises(PeerUnreachable, match="another certificate") as caught:
                await b.announce(ANNOUNCED)
            assert caught.value.reason is Reason.IDENTITY
        assert host.calls == []

    asyncio.run(scenario())


def test_a_pinned_certificate_is_valid_only_for_its_own_name() -> None:
    """Even if peers.yaml gave site-a the certificate of site-c."""

    async def scenario() -> None:
        async with serving(FakeHost(), C, peers=(B,)) as (_, address):
            site_a = PeerName("site-a")
            mixed = PeerClient(site_a, DirectChannel(site_a, address, [C.certificate], B))
            with pytest.raises(PeerUnreachable, match="another certificate"):
                await mixed.hello(HELLO)
            await mixed.close()

    asyncio.run(scenario())


def rpc(calls: AuthenticatedCalls, name: str) -> Any:
    """The function that gRPC calls for an RPC."""
    details = SimpleNamespace(method=f"/lightyear_node.v1.Exchange/{name}")
    handler = calls.rpc_handlers().service(details)  # type: ignore[arg-type]
    assert handler is not None
    return handler.stream_stream


def test_old_tls_is_refused_where_grpc_reports_the_version() -> None:
    class Aborted(Exception):
        pass

    class Context:
        def __init__(self, **tls: bytes) -> None:
            self.tls = {key: [value] for key, value in tls.items()}
            self.code: grpc.StatusCode | None = None

        def auth_context(self) -> dict[str, list[bytes]]:
            return self.tls

        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

        async def abort(self, code: grpc.StatusCode, details: str) -> None:
            self.code = code
            raise Aborted

    async def scenario() -> None:
        host = FakeHost()
        calls = AuthenticatedCalls(
            Handlers(host, Path()), host, HandshakeCounter(10.0), StrangerLimits(), ReverseStreams()
        )
        calls.set_pins(pins(B))
        fetch = rpc(calls, "Fetch")
        pem = B.certificate.pem
        for context in (Context(x509_pem_cert=pem, ssl_tls_version=b"TLSv1.2"), Context()):
            with pytest.raises(Aborted):
                await fetch(None, context)
            assert context.code is grpc.StatusCode.PERMISSION_DENIED
        assert host.denials == [("old_tls", "site-b"), ("unknown_peer", None)]
        assert host.calls == []

    asyncio.run(scenario())
