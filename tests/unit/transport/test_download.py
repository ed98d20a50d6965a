"""Fetching an update from an honest peer."""

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
from lightyear_node.storage.blobs import BlobStore
from lightyear_node.types import CHUNK_BYTES, Digest, Reason
from lightyear_node.v1 import exchange_pb2 as pb
from tests.support.fake_peer import FRAMES, chunk, listed, sending
from tests.support.tls_sites import (
    CHUNKS,
    CONTENT,
    DIGEST,
    GRID,
    HEADER,
    MANIFEST,
    FakeHost,
    calling,
    flip,
    hostile,
    near,
    offering,
    raw_stub,
    serving,
)

pytestmark = pytest.mark.usefixtures("short_pauses")


def test_an_update_is_fetched_completely(tmp_path: Path) -> None:
    async def scenario() -> None:
        host, store = FakeHost(offering(tmp_path / "offered")), BlobStore(tmp_path / "store")
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
        peer, sent = host.transfers[0]
        assert (peer, sent.raw_bytes) == ("site-b", len(CONTENT))
        assert sent.wire_bytes == transfer.wire_bytes
        assert (again.raw_bytes, again.wire_bytes) == (0, 0)
        assert host.calls == [("site-b", DIGEST)], "a stored update is not requested again"

    asyncio.run(scenario())


@pytest.mark.parametrize("length", [0, len(CONTENT) - 1, len(CONTENT) + 1])
def test_a_base_of_another_length_is_not_used(tmp_path: Path, length: int) -> None:
    """It is damaged, or the peer has named another of our files: the full update is fetched."""

    async def scenario() -> None:
        base = tmp_path / "base"
        base.write_bytes(near(CONTENT, HEADER))
        host, store = FakeHost(offering(tmp_path / "offered", base)), BlobStore(tmp_path / "store")
        manifest = dataclasses.replace(MANIFEST, base=Digest("ab" * 32))
        store.path(Digest("ab" * 32)).write_bytes(base.read_bytes().ljust(length, b"\0")[:length])
        async with serving(host) as (_, address), calling(address) as client:
            transfer = await client.fetch(manifest, store, GRID)
        assert store.path(DIGEST).read_bytes() == CONTENT
        assert transfer.wire_bytes == sum(map(len, FRAMES))

    asyncio.run(scenario())


def test_a_file_deleted_while_it_is_sent_is_still_fetched(tmp_path: Path) -> None:
    async def scenario() -> None:
        host, store = FakeHost(offering(tmp_path / "offered")), BlobStore(tmp_path / "store")
        async with serving(host) as (_, address), calling(address) as client:
            await client.fetch(
                MANIFEST,
                store,
                GRID,
                lambda done, total: (tmp_path / "offered").unlink(missing_ok=True),
            )
        assert store.verify(DIGEST)

    asyncio.run(scenario())


def test_an_update_that_is_not_offered_is_reported(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(FakeHost()) as (_, address), calling(address) as client:
            with pytest.raises(PeerUnreachable, match="no longer offers") as caught:
                await client.fetch(MANIFEST, BlobStore(tmp_path), GRID)
        assert caught.value.reason is Reason.STALE_ROUND

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("restarted", [False, True])
def test_a_damaged_base_is_reported_and_not_used(tmp_path: Path, restarted: bool) -> None:
    """Its size is right; the chunks received before are kept."""

    async def scenario() -> None:
        base = tmp_path / "base"
        base.write_bytes(near(CONTENT, HEADER))
        host, store = FakeHost(offering(tmp_path / "offered", base)), BlobStore(tmp_path / "store")
        scratch = store.scratch_path()
        scratch.write_bytes(base.read_bytes())
        known = store.adopt(scratch).digest
        flip(store.path(known), 2 * CHUNK_BYTES + 77)
        if restarted:
            store = BlobStore(tmp_path / "store")
        manifest = dataclasses.replace(MANIFEST, base=known)
        damaged: list[Digest] = []
        async with serving(host) as (_, address), calling(address) as client:
            await client.fetch(manifest, store, GRID, on_damaged=damaged.append)
        assert store.verify(DIGEST)
        assert damaged == [known]

    asyncio.run(scenario())


def test_a_valid_base_is_used(tmp_path: Path) -> None:
    async def scenario() -> None:
        base = tmp_path / "base"
        base.write_bytes(near(CONTENT, HEADER))
        host, store = FakeHost(offering(tmp_path / "offered", base)), BlobStore(tmp_path / "store")
        scratch = store.scratch_path()
        scratch.write_bytes(base.read_bytes())
        manifest = dataclasses.replace(MANIFEST, base=store.adopt(scratch).digest)
        async with serving(host) as (_, address), calling(address) as client:
            transfer = await client.fetch(manifest, store, GRID)
        assert store.verify(DIGEST)
        assert transfer.wire_bytes < 0.7 * sum(map(len, FRAMES))

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["truncated", "one bit"])
def test_a_damaged_file_at_the_sender_ends_the_stream(tmp_path: Path, kind: str) -> None:
    """It never sends bytes that it has not signed; the receiver sees a disconnect."""

    async def scenario() -> None:
        host, store = FakeHost(offering(tmp_path / "offered")), BlobStore(tmp_path / "store")
        if kind == "one bit":
            flip(tmp_path / "offered", 2 * CHUNK_BYTES + 77)
        else:
            os.truncate(tmp_path / "offered", 2 * CHUNK_BYTES + 5)
        async with serving(host) as (_, address), calling(address) as client:
            with pytest.raises(PeerUnreachable, match="chunk 2") as caught:
                await client.fetch(MANIFEST, store, GRID)
        assert caught.value.reason is Reason.TRUNCATED
        assert "chunk 2 of" in host.damages[0]
        assert ("site-b", Reason.TRUNCATED) in host.failed_uploads

    asyncio.run(scenario())


def test_the_same_content_from_two_peers_is_fetched_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = BlobStore(tmp_path)
        first_started, may_continue = asyncio.Event(), asyncio.Event()

        async def paused(request: Any, context: Any) -> None:
            await sending(listed(), chunk(0))(request, context)
            await may_continue.wait()
            await sending(*(chunk(i) for i in range(1, len(CHUNKS))))(request, context)

        async with hostile(paused) as address, calling(address) as one, calling(address) as two:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(
                    one.fetch(MANIFEST, store, GRID, lambda done, total: first_started.set())
                )
                async with asyncio.timeout(20):
                    await first_started.wait()
                with pytest.raises(PeerUnreachable, match="another peer is already sending"):
                    await two.fetch(MANIFEST, store, GRID)
                may_continue.set()
            assert (await two.fetch(MANIFEST, store, GRID)).raw_bytes == 0
        assert store.verify(DIGEST)

    asyncio.run(scenario())


def test_a_request_for_a_chunk_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        host = FakeHost(offering(tmp_path / "offered"))
        async with serving(host) as (_, address), raw_stub(address) as stub:
            request = pb.FetchRequest(digest=bytes.fromhex(DIGEST), first_chunk=len(CHUNKS) + 1)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Fetch(request).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert host.denials == [("malformed", "site-b")]

    asyncio.run(scenario())


def test_a_disk_error_is_not_attributed_to_the_peer(tmp_path: Path) -> None:
    async def scenario() -> None:
        host, store = FakeHost(offering(tmp_path / "offered")), BlobStore(tmp_path / "store")
        (store.folder / f"{DIGEST}.part").mkdir()
        async with serving(host) as (_, address), calling(address) as client:
            with pytest.raises(StoreError):
                await client.fetch(MANIFEST, store, GRID)

    asyncio.run(scenario())


def test_after_a_full_disk_a_fetch_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        host, store = FakeHost(offering(tmp_path / "offered")), BlobStore(tmp_path / "store")
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
