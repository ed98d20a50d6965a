"""Who may call, and whom we call: pinned certificates, and all others, over real TLS."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from lightyear_node.errors import ConfigError, PeerError, PeerRefusedUs, PeerUnreachable
from lightyear_node.identity import Identity
from lightyear_node.records import PeerName, Reason
from lightyear_node.store import Store
from lightyear_node.transport.borrowing import LentLines
from lightyear_node.transport.client import PeerClient
from lightyear_node.transport.doorway import Doorway
from lightyear_node.transport.lines import Direct
from lightyear_node.transport.server import ExchangeServer, _Calls
from lightyear_node.transport.service import Service
from lightyear_node.v1 import exchange_pb2 as pb
from lightyear_node.v1 import exchange_pb2_grpc

from .sites import (
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


# -- pinned peers ---------------------------------------------------------------------------------


def test_pinned_peers_greet_and_announce() -> None:
    async def scenario() -> None:
        host = FakeHost()
        host.answer = lambda peer, said: dataclasses.replace(said, lamport=said.lamport + 1)
        async with (
            serving(host) as (_, address),
            calling(address, B) as b,
            calling(address, C) as c,
        ):
            assert (await b.hello(HELLO)) == dataclasses.replace(HELLO, lamport=13)
            assert (await c.announce(ANNOUNCED)) == dataclasses.replace(ANNOUNCED, lamport=4)
            assert (await c.announce(QUIET)).latest is None
        assert host.heard == [("site-b", HELLO), ("site-c", ANNOUNCED), ("site-c", QUIET)]
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
            assert [peer for peer, _ in host.heard] == ["site-b", "site-b"]

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
            server.admit(A, pins(C))
            # Its connection was cut, and it does not get another.
            with pytest.raises(PeerUnreachable):
                await old.hello(HELLO)
            async with calling(address, C) as new:
                await new.hello(HELLO)
            async with calling(address, B) as again:
                with pytest.raises(PeerUnreachable):
                    await again.hello(HELLO)
        assert [peer for peer, _ in host.heard] == ["site-b", "site-c"]

    asyncio.run(scenario())


def test_a_connection_that_outlives_its_pin_is_refused_at_every_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Should cutting fail, as where the system does not show a process its sockets."""
    monkeypatch.setattr("lightyear_node.transport.server.hang_up", lambda connections: None)

    async def scenario() -> None:
        host = FakeHost()
        async with serving(host, peers=(B,)) as (server, address), calling(address, B) as old:
            await old.hello(HELLO)
            server.admit(A, pins(C))
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
            server.admit(A_RENEWED, pins(B, C))
            await old.hello(HELLO)  # a running connection goes on
            await new.hello(HELLO)

    asyncio.run(scenario())


@pytest.mark.parametrize("left", [(B, C), (C,), ()], ids=["its other pin", "others", "nobody"])
def test_a_withdrawn_pin_ends_a_stream_at_once_whose_reader_does_not_read(
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
            untouched, stalled = bystander.Fetch(request), stub.Fetch(request)
            for call in (untouched, stalled):
                await call.read()
            server.admit(A, pins(*left))
            async with asyncio.timeout(1):
                assert await stalled.code() is grpc.StatusCode.UNAVAILABLE
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Hello(pb.Greeting())
            if left:
                assert await status_of(untouched) is grpc.StatusCode.OK
        assert len(host.transfers) == len(left[-1:])

    asyncio.run(scenario())


def test_closing_a_client_cuts_a_fetch_or_lets_it_end(tmp_path: Path) -> None:
    async def scenario(grace_s: float) -> None:
        host, store = FakeHost(offering(tmp_path / "offered")), Store(tmp_path / f"{grace_s}")
        host.gates["offer"] = asyncio.Event()
        async with serving(host) as (_, address), asyncio.TaskGroup() as tasks:
            client = PeerClient(A.name, Direct(A.name, address, [A.certificate], B))
            fetch = tasks.create_task(outcome(client.fetch(MANIFEST, store, GRID)))
            await host.until(lambda: bool(host.heard))
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


def test_nobody_pinned_is_not_everybody_trusted() -> None:
    with pytest.raises(ConfigError, match="no peer"):
        ExchangeServer(A, {}, Service(FakeHost(), Path()), FakeHost())


# -- everybody else -------------------------------------------------------------------------------


def test_strangers_are_refused_in_the_handshake() -> None:
    async def scenario() -> None:
        host = FakeHost()
        async with serving(host) as (_, address):
            # The right name in a certificate that nobody has pinned.
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
        assert host.heard == []

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
        assert host.heard == []

    asyncio.run(scenario())


@pytest.mark.parametrize("impostor", [STRANGER, A_RENEWED, C])
def test_a_site_with_another_certificate_is_not_spoken_to(impostor: Any) -> None:
    async def scenario() -> None:
        host = FakeHost()
        async with serving(host, impostor) as (_, address), calling(address, pinned=(A,)) as b:
            with pytest.raises(PeerUnreachable, match="another certificate") as caught:
                await b.announce(ANNOUNCED)
            assert caught.value.reason is Reason.IDENTITY
        assert host.heard == []

    asyncio.run(scenario())


def test_a_pinned_certificate_speaks_only_for_its_own_name() -> None:
    """Even if peers.yaml gave site-a the certificate of site-c."""

    async def scenario() -> None:
        async with serving(FakeHost(), C, peers=(B,)) as (_, address):
            site_a = PeerName("site-a")
            mixed = PeerClient(site_a, Direct(site_a, address, [C.certificate], B))
            with pytest.raises(PeerUnreachable, match="another certificate"):
                await mixed.hello(HELLO)
            await mixed.close()

    asyncio.run(scenario())


def test_old_tls_is_refused_where_grpc_tells_it() -> None:
    class Ended(Exception):
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
            raise Ended

    async def scenario() -> None:
        host = FakeHost()
        calls = _Calls(Service(host, Path()), host, Doorway(10.0), LentLines())
        calls.admit(pins(B))
        pem = B.certificate.pem
        for context in (Context(x509_pem_cert=pem, ssl_tls_version=b"TLSv1.2"), Context()):
            with pytest.raises(Ended):
                await calls._fetch(None, context)
            assert context.code is grpc.StatusCode.PERMISSION_DENIED
        assert host.denials == [("old_tls", "site-b"), ("unknown_peer", None)]
        assert host.heard == []

    asyncio.run(scenario())
