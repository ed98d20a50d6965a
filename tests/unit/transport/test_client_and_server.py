"""Messages and limits between pinned peers, over real TLS on loopback."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from lightyear_node.errors import PeerMisbehaved, PeerRefusedUs, PeerUnreachable
from lightyear_node.protocol.manifests import refusal
from lightyear_node.transport import limits
from lightyear_node.transport.client import PeerClient
from lightyear_node.transport.limits import TokenBucket
from lightyear_node.types import Announcement, PeerName, Reason, Round, SignedManifest
from lightyear_node.v1 import exchange_pb2 as pb
from tests.support.tls_sites import (
    ANNOUNCED,
    DIGEST,
    HELLO,
    MANIFEST,
    QUIET,
    A,
    B,
    C,
    FakeHost,
    calling,
    hostile,
    offering,
    raw_stub,
    serving,
    status_of,
)

# -- Messages -------------------------------------------------------------------------------------


def test_a_manifest_of_another_peer_is_refused() -> None:
    async def scenario() -> None:
        host = FakeHost()

        def admit(peer: PeerName, sent: Announcement) -> Announcement:
            assert sent.latest is not None
            found = refusal(
                sent.latest,
                peer=peer,
                federation="chest-xray",
                schema=MANIFEST.schema,
                raw_bytes=MANIFEST.raw_bytes,
                dtype=MANIFEST.dtype,
                verify_keys=[B.certificate.signing_key],
            )
            if found:
                raise PeerMisbehaved(peer, *found)
            return sent

        host.answer = admit
        own_update = dataclasses.replace(MANIFEST.update, peer=PeerName("site-b"))
        own = B.sign_manifest(dataclasses.replace(MANIFEST, update=own_update))
        async with serving(host) as (_, address), calling(address, B) as b:
            await b.announce(dataclasses.replace(QUIET, latest=own))
            # Signed by site-a, but sent by site-b.
            with pytest.raises(PeerRefusedUs, match="in the name of 'site-a'") as caught:
                await b.announce(ANNOUNCED)
            assert caught.value.reason is Reason.IDENTITY

    asyncio.run(scenario())


def test_a_refused_greeting_has_a_reason() -> None:
    async def scenario() -> None:
        host = FakeHost()

        def refuse(peer: PeerName, sent: object) -> object:
            raise PeerRefusedUs(peer, Reason.FEDERATION, "this is brain-mri")

        host.answer = refuse
        async with serving(host) as (_, address), calling(address) as client:
            with pytest.raises(PeerRefusedUs) as caught:
                await client.hello(HELLO)
        assert caught.value.reason is Reason.FEDERATION
        assert str(caught.value) == "site-a: refuses us: this is brain-mri"

    asyncio.run(scenario())


def test_a_refused_caller_gets_the_message_for_its_own_operator() -> None:
    async def scenario() -> None:
        host = FakeHost()

        def refuse(peer: PeerName, sent: object) -> object:
            about, message = "running with its keys", "running with our keys"
            raise PeerMisbehaved(peer, Reason.IDENTITY, about, message_for_peer=message)

        host.answer = refuse
        async with serving(host) as (_, address), calling(address) as client:
            with pytest.raises(PeerRefusedUs) as caught:
                await client.announce(QUIET)
        assert str(caught.value) == "site-a: refuses us: running with our keys"

    asyncio.run(scenario())


def test_our_own_exceptions_are_not_sent_to_peers(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        host = FakeHost()

        def fail(peer: PeerName, sent: object) -> object:
            raise KeyError("/secret/path")

        host.answer = fail
        async with serving(host) as (_, address), calling(address) as client:
            with pytest.raises(PeerUnreachable) as caught:
                await client.hello(HELLO)
        assert "secret" not in str(caught.value)
        assert "secret" in caplog.text

    asyncio.run(scenario())


def test_malformed_messages_do_not_reach_the_host() -> None:
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
        assert host.calls == []
        assert host.denials == [("malformed", "site-b")] * 7

    asyncio.run(scenario())


def test_unparsable_requests_are_refused() -> None:
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
        assert host.calls == [("site-b", HELLO)]

    asyncio.run(scenario())


def test_a_malformed_answer_is_reported_as_misbehaviour() -> None:
    async def scenario() -> None:
        host = FakeHost()
        forged = SignedManifest(MANIFEST, b"short")
        host.answer = lambda peer, sent: dataclasses.replace(sent, latest=forged)
        async with serving(host) as (_, address), calling(address) as client:
            with pytest.raises(PeerMisbehaved, match="signature") as caught:
                await client.announce(QUIET)
        assert caught.value.reason is Reason.MALFORMED

    asyncio.run(scenario())


def test_a_peers_error_text_is_made_safe_for_the_log() -> None:
    async def scenario() -> None:
        async def fetch(request: Any, context: Any) -> None:
            pass

        async with hostile(fetch) as address, calling(address) as client:
            with pytest.raises(PeerRefusedUs) as caught:
                await client.hello(HELLO)
        assert str(caught.value) == "site-a: refuses us: ?[31mno?such: reason"
        assert caught.value.reason is Reason.BLOCKED

    asyncio.run(scenario())


def test_the_largest_round_can_be_announced() -> None:
    async def scenario() -> None:
        far = dataclasses.replace(QUIET, round=Round(2**62))
        async with serving(FakeHost()) as (_, address), calling(address) as client:
            assert await client.announce(far) == far

    asyncio.run(scenario())


# -- Limits ---------------------------------------------------------------------------------------


def test_a_flood_of_announcements_is_limited_for_that_peer_only() -> None:
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


def test_a_token_bucket_refills_up_to_its_burst() -> None:
    bucket = TokenBucket(per_s=2.0, burst=3)
    assert [bucket.take(100.0) for _ in range(4)] == [True, True, True, False]
    assert [bucket.take(100.5) for _ in range(2)] == [True, False]
    assert [bucket.take(900.0) for _ in range(4)] == [True, True, True, False]


def test_fetches_are_limited_per_peer_and_in_total(
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
            await host.until(lambda: len(host.calls) == 2)
            assert await status_of(b.Fetch(request)) is grpc.StatusCode.RESOURCE_EXHAUSTED
            calls.append(c.Fetch(request))
            await host.until(lambda: len(host.calls) == 3)
            assert await status_of(c.Fetch(request)) is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert host.denials == [("too_many_fetches", peer) for peer in ("site-b", "site-c")]
            gate.set()
            for call in calls:
                assert await status_of(call) is grpc.StatusCode.OK
            await host.until(lambda: len(host.transfers) == 3)
            assert await c.Fetch(request).read() is not grpc.aio.EOF, "the slots are free again"

    asyncio.run(scenario())


def test_a_stalled_reader_blocks_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "CHUNK_WRITE_S", 0.3)
    monkeypatch.setattr(limits, "REFUSAL_WRITE_S", 0.2)
    monkeypatch.setattr(limits, "FETCHES_MAX", 2)

    async def scenario() -> None:
        host = FakeHost(offering(tmp_path / "offered"))
        request = pb.FetchRequest(digest=bytes.fromhex(DIGEST))
        async with (
            serving(host) as (_, address),
            raw_stub(address, C) as other,
            raw_stub(address, B) as stub,
        ):
            stalled = [stub.Fetch(request), stub.Fetch(request)]
            for call in stalled:
                await call.read()
            await host.until(lambda: ("slow_reader", "site-b") in host.denials)
            # It has read nothing since, and yet its connection is closed and its slots are free.
            async with asyncio.timeout(5):
                for call in stalled:
                    assert await call.code() is grpc.StatusCode.UNAVAILABLE
            assert await status_of(other.Fetch(request)) is grpc.StatusCode.OK
            assert await status_of(stub.Fetch(request)) is grpc.StatusCode.OK
        assert [peer for peer, _ in host.transfers] == ["site-c", "site-b"]
        assert ("site-b", Reason.TIMEOUT) in host.failed_uploads
        assert {peer for peer, _ in host.failed_uploads} == {"site-b"}

    asyncio.run(scenario())
    for complaint in ("a call of", "servicer method", "never retrieved"):
        assert complaint not in caplog.text, "disconnects are not logged"
