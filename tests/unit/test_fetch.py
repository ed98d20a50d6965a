"""Pulling an update from an honest peer, onto our own disk."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from lightyear_node.errors import DiskFull, PeerUnreachable, StoreError
from lightyear_node.records import CHUNK_BYTES, Digest, Reason
from lightyear_node.store import Store
from lightyear_node.v1 import exchange_pb2 as pb

from .pieces import FRAMES, chunk, listed, sending
from .sites import (
    CHUNKS,
    CONTENT,
    DIGEST,
    GRID,
    HEADER,
    MANIFEST,
    FakeHost,
    calling,
    hostile,
    near,
    offering,
    raw_stub,
    serving,
)

pytestmark = pytest.mark.usefixtures("short_pauses")


def test_an_update_arrives_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        host, store = FakeHost(offering(tmp_path / "offered")), Store(tmp_path / "store")
        progress: list[tuple[int, int]] = []
        async with serving(host) as (_, address), calling(address) as client:
            transfer = await client.fetch(
                MANIFEST, store, GRID, lambda done, total: progress.append((done, total))
            )
            await host.until(lambda: len(host.transfers) == 1)
            again = await client.fetch(MANIFEST, store, GRID)
        assert store.path(DIGEST).read_bytes() == CONTENT
        assert transfer.raw_bytes == len(CONTENT)
        assert transfer.wire_bytes == sum(map(len, FRAMES))
        assert transfer.seconds > 0
        assert progress == sorted(progress)
        assert progress[-1] == (len(CONTENT), len(CONTENT))
        peer, served = host.transfers[0]
        assert (peer, served.raw_bytes) == ("site-b", len(CONTENT))
        assert served.wire_bytes == transfer.wire_bytes
        assert (again.raw_bytes, again.wire_bytes) == (0, 0)
        assert host.heard == [("site-b", DIGEST)], "what is here is not asked for again"

    asyncio.run(scenario())


@pytest.mark.parametrize("length", [0, len(CONTENT) - 1, len(CONTENT) + 1])
def test_a_base_of_another_length_is_none(tmp_path: Path, length: int) -> None:
    """It is damaged, or the peer named some other file of ours: then the update comes in full."""

    async def scenario() -> None:
        base = tmp_path / "base"
        base.write_bytes(near(CONTENT, HEADER))
        host, store = FakeHost(offering(tmp_path / "offered", base)), Store(tmp_path / "store")
        manifest = dataclasses.replace(MANIFEST, base=Digest("ab" * 32))
        store.path(Digest("ab" * 32)).write_bytes(base.read_bytes().ljust(length, b"\0")[:length])
        async with serving(host) as (_, address), calling(address) as client:
            transfer = await client.fetch(manifest, store, GRID)
        assert store.path(DIGEST).read_bytes() == CONTENT
        assert transfer.wire_bytes == sum(map(len, FRAMES))

    asyncio.run(scenario())


def test_a_file_deleted_while_it_is_sent_still_arrives(tmp_path: Path) -> None:
    async def scenario() -> None:
        host, store = FakeHost(offering(tmp_path / "offered")), Store(tmp_path / "store")
        async with serving(host) as (_, address), calling(address) as client:
            await client.fetch(
                MANIFEST,
                store,
                GRID,
                lambda done, total: (tmp_path / "offered").unlink(missing_ok=True),
            )
        assert store.verify(DIGEST)

    asyncio.run(scenario())


def test_what_is_not_offered_is_said_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(FakeHost()) as (_, address), calling(address) as client:
            with pytest.raises(PeerUnreachable, match="no longer offers") as caught:
                await client.fetch(MANIFEST, Store(tmp_path), GRID)
        assert caught.value.reason is Reason.STALE_ROUND

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_at_the_sender_ends_the_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        host, store = FakeHost(offering(tmp_path / "offered")), Store(tmp_path / "store")
        with (tmp_path / "offered").open("r+b") as file:
            file.truncate(2 * CHUNK_BYTES + 5)
        async with serving(host) as (_, address), calling(address) as client:
            with pytest.raises(PeerUnreachable, match="chunk 2") as caught:
                await client.fetch(MANIFEST, store, GRID)
        assert caught.value.reason is Reason.TRUNCATED
        assert "chunk 2 of a stored update" in caplog.text
        assert ("site-b", Reason.TRUNCATED) in host.broken

    asyncio.run(scenario())


def test_one_content_from_two_peers_is_fetched_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = Store(tmp_path)
        first_has_begun, may_go_on = asyncio.Event(), asyncio.Event()

        async def held(request: Any, context: Any) -> None:
            await sending(listed(), chunk(0))(request, context)
            await may_go_on.wait()
            await sending(*(chunk(i) for i in range(1, len(CHUNKS))))(request, context)

        async with hostile(held) as address, calling(address) as one, calling(address) as two:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(
                    one.fetch(MANIFEST, store, GRID, lambda done, total: first_has_begun.set())
                )
                async with asyncio.timeout(20):
                    await first_has_begun.wait()
                with pytest.raises(PeerUnreachable, match="from another peer"):
                    await two.fetch(MANIFEST, store, GRID)
                may_go_on.set()
            assert (await two.fetch(MANIFEST, store, GRID)).raw_bytes == 0
        assert store.verify(DIGEST)

    asyncio.run(scenario())


def test_a_chunk_that_does_not_exist_cannot_be_asked_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        host = FakeHost(offering(tmp_path / "offered"))
        async with serving(host) as (_, address), raw_stub(address) as stub:
            request = pb.FetchRequest(digest=bytes.fromhex(DIGEST), first_chunk=len(CHUNKS) + 1)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Fetch(request).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert host.denials == [("malformed", "site-b")]

    asyncio.run(scenario())


def test_a_disk_error_is_ours_and_not_the_peers(tmp_path: Path) -> None:
    async def scenario() -> None:
        host, store = FakeHost(offering(tmp_path / "offered")), Store(tmp_path / "store")
        (store.folder / f"{DIGEST}.part").mkdir()
        async with serving(host) as (_, address), calling(address) as client:
            with pytest.raises(StoreError):
                await client.fetch(MANIFEST, store, GRID)

    asyncio.run(scenario())


def test_a_full_disk_is_ours_too_and_what_had_come_is_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        host, store = FakeHost(offering(tmp_path / "offered")), Store(tmp_path / "store")
        actual = os.pwrite

        def full(fd: int, raw: bytes, at: int) -> int:
            if at >= CHUNK_BYTES:
                raise OSError(errno.ENOSPC, "No space left on device")
            return actual(fd, raw, at)

        async with serving(host) as (_, address), calling(address) as client:
            monkeypatch.setattr(os, "pwrite", full)
            with pytest.raises(DiskFull, match="No space left"):
                await client.fetch(MANIFEST, store, GRID)
            assert not store.has(DIGEST)
            monkeypatch.undo()
            transfer = await client.fetch(MANIFEST, store, GRID)
        assert transfer.raw_bytes == len(CONTENT) - CHUNK_BYTES
        assert store.verify(DIGEST)

    asyncio.run(scenario())
