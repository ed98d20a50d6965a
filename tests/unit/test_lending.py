"""Calls to a site without a port: over the lines it lends, and with the limits of any other."""

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
from lightyear_node.records import PeerName, Reason
from lightyear_node.store import Store
from lightyear_node.transport import limits
from lightyear_node.transport.borrowing import Borrowed
from lightyear_node.transport.client import PeerClient
from lightyear_node.transport.lending import keep_lending
from lightyear_node.transport.lines import Direct
from lightyear_node.transport.service import Service
from lightyear_node.v1 import exchange_pb2 as pb

from .sites import (
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
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FETCH_PAUSE_S", 0.05)
    monkeypatch.setattr(limits, "LENT_WAIT_S", 1.0)


@contextlib.asynccontextmanager
async def lending(host: FakeHost) -> AsyncIterator[tuple[PeerClient, Any]]:
    """Site-b lends its lines to site-a; yields site-a's client for site-b, and its server."""
    with tempfile.TemporaryDirectory() as scratch:
        service = Service(host, Path(scratch))
        async with serving(FakeHost()) as (server, address):
            line = Direct(SITE_A, address, [A.certificate], B)
            loop = asyncio.get_running_loop()
            lenders = [
                loop.create_task(keep_lending(SITE_A, lambda: line, service))
                for _ in range(limits.LENT_IDLE)
            ]
            try:
                yield PeerClient(SITE_B, Borrowed(SITE_B, server.lent)), server
            finally:
                for lender in lenders:
                    lender.cancel()
                await asyncio.gather(*lenders, return_exceptions=True)
                await line.close()
                service.close()


def test_a_site_without_a_port_is_greeted_and_heard() -> None:
    async def scenario() -> None:
        host = FakeHost()
        host.answer = lambda peer, said: dataclasses.replace(said, lamport=said.lamport + 1)
        async with lending(host) as (client, _):
            assert await client.hello(HELLO) == dataclasses.replace(HELLO, lamport=13)
            for _ in range(5):  # more often than there are lines: each is followed by another
                assert (await client.announce(QUIET)).lamport == QUIET.lamport + 1
        assert host.heard == [("site-a", HELLO), *[("site-a", QUIET)] * 5]

    asyncio.run(scenario())


def test_its_update_is_fetched_and_a_cut_fetch_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        host, store = FakeHost(offering(tmp_path / "offered")), Store(tmp_path / "store")
        async with lending(host) as (client, _):
            begun = asyncio.Event()
            async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
                task = tasks.create_task(
                    client.fetch(MANIFEST, store, GRID, lambda *_: begun.set())
                )
                await begun.wait()
                task.cancel()
            kept = store.partial_chunks(DIGEST, len(CONTENT))
            assert kept >= 1
            transfer = await client.fetch(MANIFEST, store, GRID)
            assert transfer.raw_bytes <= len(CONTENT) - kept * (1 << 20)
        assert store.path(DIGEST).read_bytes() == CONTENT

    asyncio.run(scenario())


def test_its_refusals_are_those_of_any_other_site() -> None:
    async def scenario() -> None:
        host = FakeHost()

        def refuse(peer: PeerName, said: Any) -> Any:
            raise PeerMisbehaved(peer, Reason.FEDERATION, "it belongs elsewhere")

        host.answer = refuse
        async with lending(host) as (client, _):
            with pytest.raises(PeerRefusedUs, match="refuses us: it belongs elsewhere") as caught:
                await client.hello(HELLO)
            assert caught.value.reason is Reason.FEDERATION
            with pytest.raises(PeerUnreachable, match="no longer offers"):
                await client.fetch(MANIFEST, Store(Path(tempfile.mkdtemp())), GRID)

    asyncio.run(scenario())


def test_a_site_that_never_called_is_said_to_be_silent() -> None:
    async def scenario() -> None:
        async with serving(FakeHost()) as (server, _):
            client = PeerClient(SITE_B, Borrowed(SITE_B, server.lent))
            with pytest.raises(PeerUnreachable, match="has not called us lately"):
                await client.hello(HELLO)

    asyncio.run(scenario())


def test_a_line_that_breaks_is_opened_again() -> None:
    async def scenario() -> None:
        async with lending(FakeHost()) as (client, server):
            await client.hello(HELLO)
            # Site-b's connection is cut, as if it had been removed, and then it is pinned again.
            server.admit(A, pins(A))
            server.admit(A, pins(B))
            async with asyncio.timeout(20):
                while True:
                    with contextlib.suppress(PeerUnreachable):
                        await client.hello(HELLO)
                        return

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([pb.Answer()], "another question"),
        ([pb.Answer(piece=pb.Piece())], "another question"),
        ([pb.Answer(hello=pb.Greeting(agreement=b"short"))], "agreement"),
        ([], "broke"),
    ],
)
def test_rubbish_on_a_lent_line_is_the_lenders_fault(answers: list[Any], words: str) -> None:
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
                client = PeerClient(SITE_B, Borrowed(SITE_B, server.lent))
                with pytest.raises((PeerMisbehaved, PeerUnreachable), match=words):
                    await client.hello(HELLO)

    asyncio.run(scenario())


def test_no_more_lines_are_taken_than_are_of_use() -> None:
    async def scenario() -> None:
        host = FakeHost()
        async with serving(host) as (_, address), raw_stub(address, B) as stub:
            calls = [stub.Lend() for _ in range(limits.LENT_PER_PEER_MAX)]
            for call in calls:
                await call.wait_for_connection()
            refused = stub.Lend()
            async with asyncio.timeout(10):
                assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert ("too_many_calls", "site-b") in host.denials
            for call in calls:
                call.cancel()

    asyncio.run(scenario())
