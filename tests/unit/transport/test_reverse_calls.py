"""Calls to a site without a port, over the streams that it opens."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from lightyear_node.errors import PeerMisbehaved, PeerRefusedUs, PeerUnreachable
from lightyear_node.storage.blobs import BlobStore
from lightyear_node.transport import limits
from lightyear_node.transport.channel import DirectChannel
from lightyear_node.transport.client import PeerClient
from lightyear_node.transport.handlers import Handlers
from lightyear_node.transport.reverse_calls import ReverseChannel, serve_reverse_calls
from lightyear_node.types import PeerName, Reason
from lightyear_node.v1 import exchange_pb2 as pb
from tests.support.tls_sites import (
    CONTENT,
    DIGEST,
    GRID,
    HELLO,
    MANIFEST,
    QUIET,
    A,
    B,
    FakeHost,
    offering,
    pins,
    raw_stub,
    serving,
)

SITE_A, SITE_B = PeerName("site-a"), PeerName("site-b")


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FETCH_BACKOFF_S", 0.05)
    monkeypatch.setattr(limits, "REVERSE_STREAM_WAIT_S", 1.0)


@contextlib.asynccontextmanager
async def site_without_port(host: FakeHost) -> AsyncIterator[tuple[PeerClient, Any]]:
    """Site-b opens streams to site-a; yields site-a's client for site-b, and its server."""
    with tempfile.TemporaryDirectory() as scratch:
        handlers = Handlers(host, Path(scratch))
        async with serving(FakeHost()) as (server, address):
            channel = DirectChannel(SITE_A, address, [A.certificate], B)
            loop = asyncio.get_running_loop()
            servers = [
                loop.create_task(serve_reverse_calls(SITE_A, lambda: channel, handlers))
                for _ in range(limits.REVERSE_STREAMS_IDLE)
            ]
            try:
                yield PeerClient(SITE_B, ReverseChannel(SITE_B, server.reverse_streams)), server
            finally:
                for task in servers:
                    task.cancel()
                await asyncio.gather(*servers, return_exceptions=True)
                await channel.close()
                handlers.close()


def test_a_site_without_a_port_answers_greetings_and_announcements() -> None:
    async def scenario() -> None:
        host = FakeHost()
        host.answer = lambda peer, sent: dataclasses.replace(sent, lamport=sent.lamport + 1)
        async with site_without_port(host) as (client, _):
            assert await client.hello(HELLO) == dataclasses.replace(HELLO, lamport=13)
            for _ in range(5):  # more than there are streams: a used one is replaced
                assert (await client.announce(QUIET)).lamport == QUIET.lamport + 1
        assert host.calls == [("site-a", HELLO), *[("site-a", QUIET)] * 5]

    asyncio.run(scenario())


def test_an_update_is_fetched_and_an_interrupted_fetch_resumes(tmp_path: Path) -> None:
    async def scenario() -> None:
        host, store = FakeHost(offering(tmp_path / "offered")), BlobStore(tmp_path / "store")
        async with site_without_port(host) as (client, _):
            started = asyncio.Event()
            async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
                task = tasks.create_task(
                    client.fetch(MANIFEST, store, GRID, lambda *_: started.set())
                )
                await started.wait()
                task.cancel()
            kept = store.partial_chunks(DIGEST, len(CONTENT))
            assert kept >= 1
            transfer = await client.fetch(MANIFEST, store, GRID)
            assert transfer.raw_bytes <= len(CONTENT) - kept * (1 << 20)
        assert store.path(DIGEST).read_bytes() == CONTENT

    asyncio.run(scenario())


class EndedCall:
    """A call whose caller asks for an update and ends it before the answer."""

    async def read(self) -> bytes:
        request = pb.FetchRequest(digest=bytes.fromhex(DIGEST))
        return bytes(pb.Question(fetch=request).SerializeToString())

    async def write(self, answer: bytes) -> None:
        raise asyncio.InvalidStateError("RPC already finished.")

    def cancel(self) -> None:
        pass


class EndingChannel:
    """A connection on which every call is ended early."""

    opened = 0

    def open_reverse_stream(self) -> EndedCall:
        self.opened += 1
        return EndedCall()


def test_a_caller_that_ends_its_call_is_no_error_of_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    channel: Any = EndingChannel()
    host = FakeHost(offering(tmp_path / "offered"))

    async def scenario() -> None:
        handlers = Handlers(host, tmp_path)
        serving_calls = serve_reverse_calls(SITE_A, lambda: channel, handlers)
        task = asyncio.get_running_loop().create_task(serving_calls)
        async with asyncio.timeout(20):
            while channel.opened < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        handlers.close()

    asyncio.run(scenario())
    assert not caplog.records


def test_refusals_arrive_as_those_of_a_direct_call() -> None:
    async def scenario() -> None:
        host = FakeHost()

        def refuse(peer: PeerName, sent: Any) -> Any:
            raise PeerMisbehaved(peer, Reason.FEDERATION, "it belongs elsewhere")

        host.answer = refuse
        async with site_without_port(host) as (client, _):
            with pytest.raises(PeerRefusedUs, match="refuses us: it belongs elsewhere") as caught:
                await client.hello(HELLO)
            assert caught.value.reason is Reason.FEDERATION
            with pytest.raises(PeerUnreachable, match="no longer offers"):
                await client.fetch(MANIFEST, BlobStore(Path(tempfile.mkdtemp())), GRID)

    asyncio.run(scenario())


def test_a_site_that_has_opened_no_stream_is_unreachable() -> None:
    async def scenario() -> None:
        async with serving(FakeHost()) as (server, _):
            client = PeerClient(SITE_B, ReverseChannel(SITE_B, server.reverse_streams))
            with pytest.raises(PeerUnreachable, match="has not called us lately"):
                await client.hello(HELLO)

    asyncio.run(scenario())


def test_broken_streams_are_opened_again() -> None:
    async def scenario() -> None:
        async with site_without_port(FakeHost()) as (client, server):
            await client.hello(HELLO)
            # Site-b is removed, which closes its connection, and then pinned again.
            server.set_credentials(A, pins(A))
            server.set_credentials(A, pins(B))
            async with asyncio.timeout(20):
                while True:
                    with contextlib.suppress(PeerUnreachable):
                        await client.hello(HELLO)
                        return

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([pb.Answer()], "another question"),
        ([pb.Answer(piece=pb.Piece())], "another question"),
        ([pb.Answer(hello=pb.Greeting(agreement=b"short"))], "agreement"),
        ([], "broke"),
    ],
)
def test_an_invalid_answer_is_attributed_to_the_peer(answers: list[Any], message: str) -> None:
    async def scenario() -> None:
        async with serving(FakeHost()) as (server, address), raw_stub(address, B) as stub:
            call = stub.Lend()

            async def answer() -> None:
                await call.read()
                for one in answers:
                    await call.write(one)
                await call.done_writing()

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(answer())
                client = PeerClient(SITE_B, ReverseChannel(SITE_B, server.reverse_streams))
                with pytest.raises((PeerMisbehaved, PeerUnreachable), match=message):
                    await client.hello(HELLO)

    asyncio.run(scenario())


def test_the_number_of_streams_per_peer_is_limited() -> None:
    async def scenario() -> None:
        host = FakeHost()
        async with serving(host) as (_, address), raw_stub(address, B) as stub:
            calls = [stub.Lend() for _ in range(limits.REVERSE_STREAMS_PER_PEER_MAX)]
            for call in calls:
                await call.wait_for_connection()
            refused = stub.Lend()
            async with asyncio.timeout(10):
                assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert ("too_many_calls", "site-b") in host.denials
            for call in calls:
                call.cancel()

    asyncio.run(scenario())
