"""Who may call, what is answered, and how much of it: over real TLS on loopback."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from lightyear_node.admission import refusal
from lightyear_node.errors import (
    ConfigError,
    PeerError,
    PeerMisbehaved,
    PeerRefusedUs,
    PeerUnreachable,
)
from lightyear_node.identity import Identity
from lightyear_node.records import Announcement, PeerName, Reason, Round, SignedManifest
from lightyear_node.store import Store
from lightyear_node.transport import limits
from lightyear_node.transport.borrowing import LentLines
from lightyear_node.transport.client import PeerClient
from lightyear_node.transport.doorway import Doorway
from lightyear_node.transport.failures import explain
from lightyear_node.transport.limits import TokenBucket
from lightyear_node.transport.lines import Direct
from lightyear_node.transport.server import ExchangeServer, _Calls
from lightyear_node.transport.service import Service
from lightyear_node.v1 import exchange_pb2 as pb
from lightyear_node.v1 import exchange_pb2_grpc

from .sites import (
    A_RENEWED,
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
    hostile,
    offering,
    pins,
    raw_stub,
    serving,
)

ANNOUNCED = dataclasses.replace(QUIET, latest=A.sign_manifest(MANIFEST))


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
                assert await _status(untouched) is grpc.StatusCode.OK
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


async def outcome(call: Awaitable[object]) -> PeerError | None:
    try:
        await call
    except PeerError as problem:
        return problem
    return None


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


# -- what is said ---------------------------------------------------------------------------------


def test_a_member_that_speaks_for_another_is_told_no() -> None:
    async def scenario() -> None:
        host = FakeHost()

        def admit(peer: PeerName, said: Announcement) -> Announcement:
            assert said.latest is not None
            found = refusal(
                said.latest,
                peer=peer,
                federation="chest-xray",
                schema=MANIFEST.schema,
                raw_bytes=MANIFEST.raw_bytes,
                dtype=MANIFEST.dtype,
                verify_keys=[B.certificate.signing_key],
                lamport=0,
            )
            if found:
                raise PeerMisbehaved(peer, *found)
            return said

        host.answer = admit
        own_update = dataclasses.replace(MANIFEST.update, peer=PeerName("site-b"))
        own = B.sign_manifest(dataclasses.replace(MANIFEST, update=own_update))
        async with serving(host) as (_, address), calling(address, B) as b:
            await b.announce(dataclasses.replace(QUIET, latest=own))
            # Signed by site-a indeed, but sent by site-b.
            with pytest.raises(PeerRefusedUs, match="in the name of 'site-a'") as caught:
                await b.announce(ANNOUNCED)
            assert caught.value.reason is Reason.IDENTITY

    asyncio.run(scenario())


def test_a_refused_greeting_brings_its_reason() -> None:
    async def scenario() -> None:
        host = FakeHost()

        def refuse(peer: PeerName, said: object) -> object:
            raise PeerRefusedUs(peer, Reason.FEDERATION, "this is brain-mri")

        host.answer = refuse
        async with serving(host) as (_, address), calling(address) as client:
            with pytest.raises(PeerRefusedUs) as caught:
                await client.hello(HELLO)
        assert caught.value.reason is Reason.FEDERATION
        assert str(caught.value) == "site-a: refuses us: this is brain-mri"

    asyncio.run(scenario())


def test_our_own_mistakes_are_not_told_to_peers(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        host = FakeHost()

        def fail(peer: PeerName, said: object) -> object:
            raise KeyError("/secret/path")

        host.answer = fail
        async with serving(host) as (_, address), calling(address) as client:
            with pytest.raises(PeerUnreachable) as caught:
                await client.hello(HELLO)
        assert "secret" not in str(caught.value)
        assert "secret" in caplog.text

    asyncio.run(scenario())


def test_malformed_messages_are_refused_before_the_host_hears_them() -> None:
    async def scenario() -> None:
        host = FakeHost()
        async with serving(host) as (_, address), raw_stub(address) as stub:
            for call in (
                stub.Hello(pb.Greeting(agreement=b"short")),
                stub.Announce(pb.Announcement(round=2**62 + 1)),
                stub.Announce(pb.Announcement(phase="\x1b[2J")),
                stub.Announce(pb.Announcement(latest=pb.SignedManifest(signature=bytes(64)))),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Fetch(pb.FetchRequest(digest=b"../../etc/passwd")).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            # Too large to be parsed, and too large to be received at all.
            for size, code in (
                (70_000, grpc.StatusCode.INVALID_ARGUMENT),
                (3 << 20, grpc.StatusCode.RESOURCE_EXHAUSTED),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Announce(pb.Announcement(phase="x" * size))
                assert caught.value.code() is code
        assert host.heard == []
        assert host.denials == [("malformed", "site-b")] * 7

    asyncio.run(scenario())


def test_bytes_that_are_no_message_are_refused() -> None:
    async def scenario() -> None:
        host = FakeHost()
        async with serving(host) as (_, address):
            credentials = grpc.ssl_channel_credentials(
                A.certificate.pem, B.tls_key_pem, B.certificate.pem
            )
            options = (("grpc.ssl_target_name_override", "site-a"),)
            async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
                call = channel.unary_unary("/lightyear_node.v1.Exchange/Announce")
                with pytest.raises(grpc.aio.AioRpcError):
                    await call(b"\xff\xff\xff\xff", timeout=5)
            async with calling(address) as client:
                await client.hello(HELLO)
        assert host.heard == [("site-b", HELLO)]

    asyncio.run(scenario())


def test_a_malformed_answer_is_the_peers_fault() -> None:
    async def scenario() -> None:
        host = FakeHost()
        forged = SignedManifest(MANIFEST, b"short")
        host.answer = lambda peer, said: dataclasses.replace(said, latest=forged)
        async with serving(host) as (_, address), calling(address) as client:
            with pytest.raises(PeerMisbehaved, match="signature") as caught:
                await client.announce(QUIET)
        assert caught.value.reason is Reason.MALFORMED

    asyncio.run(scenario())


def test_a_peers_words_are_fit_for_a_log() -> None:
    async def scenario() -> None:
        async def fetch(request: Any, context: Any) -> None:
            pass

        async with hostile(fetch) as address, calling(address) as client:
            with pytest.raises(PeerRefusedUs) as caught:
                await client.hello(HELLO)
        assert str(caught.value) == "site-a: refuses us: ?[31mno?such: reason"
        assert caught.value.reason is Reason.BLOCKED

    asyncio.run(scenario())


# -- how much -------------------------------------------------------------------------------------


def test_a_flood_of_announcements_is_stemmed_for_that_peer_alone() -> None:
    async def flood(client: PeerClient) -> None:
        for _ in range(limits.CALLS_BURST * 5):
            await client.announce(QUIET)

    async def scenario() -> None:
        host = FakeHost()
        async with (
            serving(host) as (_, address),
            calling(address, B) as b,
            calling(address, C) as c,
        ):
            for _ in range(limits.CALLS_BURST):
                await b.announce(QUIET)
            with pytest.raises(PeerUnreachable, match="busy"):
                await flood(b)
            assert host.denials == [("too_often", "site-b")]
            await c.announce(QUIET)

    asyncio.run(scenario())


def test_token_bucket_fills_with_time_and_not_beyond_its_burst() -> None:
    bucket = TokenBucket(per_s=2.0, burst=3)
    assert [bucket.take(100.0) for _ in range(4)] == [True, True, True, False]
    assert [bucket.take(100.5) for _ in range(2)] == [True, False]
    assert [bucket.take(900.0) for _ in range(4)] == [True, True, True, False]


def test_streams_are_limited_per_peer_and_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FETCHES_MAX", 3)

    async def scenario() -> None:
        host = FakeHost(offering(tmp_path / "offered"))
        request = pb.FetchRequest(digest=bytes.fromhex(next(iter(host.offers))))
        gate = asyncio.Event()
        host.gates["offer"] = gate
        async with (
            serving(host) as (_, address),
            raw_stub(address, B) as b,
            raw_stub(address, C) as c,
        ):
            calls = [b.Fetch(request), b.Fetch(request)]
            await host.until(lambda: len(host.heard) == 2)
            assert await _status(b.Fetch(request)) is grpc.StatusCode.RESOURCE_EXHAUSTED
            calls.append(c.Fetch(request))
            await host.until(lambda: len(host.heard) == 3)
            assert await _status(c.Fetch(request)) is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert host.denials == [("too_many_fetches", peer) for peer in ("site-b", "site-c")]
            gate.set()
            for call in calls:
                assert await _status(call) is grpc.StatusCode.OK
            await host.until(lambda: len(host.transfers) == 3)
            assert await c.Fetch(request).read() is not grpc.aio.EOF, "the places are free again"

    asyncio.run(scenario())


def test_a_reader_that_does_not_read_blocks_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "CHUNK_WRITE_S", 0.3)
    monkeypatch.setattr(limits, "GIVE_UP_S", 0.2)
    monkeypatch.setattr(limits, "FETCHES_MAX", 2)

    async def scenario() -> None:
        host = FakeHost(offering(tmp_path / "offered"))
        request = pb.FetchRequest(digest=bytes.fromhex(DIGEST))
        async with (
            serving(host) as (_, address),
            raw_stub(address, C) as other,
            raw_stub(address, B) as stub,
        ):
            lazy = [stub.Fetch(request), stub.Fetch(request)]
            for call in lazy:
                await call.read()
            await host.until(lambda: ("slow_reader", "site-b") in host.denials)
            # It has not read a byte more, and yet its connection, and its places, are gone.
            async with asyncio.timeout(5):
                for call in lazy:
                    assert await call.code() is grpc.StatusCode.UNAVAILABLE
            assert await _status(other.Fetch(request)) is grpc.StatusCode.OK
            assert await _status(stub.Fetch(request)) is grpc.StatusCode.OK
        assert [peer for peer, _ in host.transfers] == ["site-c", "site-b"]
        assert ("site-b", Reason.TIMEOUT) in host.broken
        assert {peer for peer, _ in host.broken} == {"site-b"}

    asyncio.run(scenario())
    for complaint in ("a call of", "servicer method", "never retrieved"):
        assert complaint not in caplog.text, "lines that end are no news"


async def _status(call: Any) -> grpc.StatusCode:
    """Read to the end, and how it ended."""
    try:
        async with asyncio.timeout(20):
            while await call.read() is not grpc.aio.EOF:
                pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


# -- addresses ------------------------------------------------------------------------------------


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


def test_rounds_are_bounded_on_the_wire_only_by_the_largest_round() -> None:
    async def scenario() -> None:
        far = dataclasses.replace(QUIET, round=Round(2**62))
        async with serving(FakeHost()) as (_, address), calling(address) as client:
            assert await client.announce(far) == far

    asyncio.run(scenario())
