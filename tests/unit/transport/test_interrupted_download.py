"""Fetching an update over a bad connection: interrupted, stalled, slow, cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from lightyear_node.errors import PeerUnreachable
from lightyear_node.storage.blobs import BlobStore, IncomingBlob
from lightyear_node.transport import limits
from lightyear_node.types import CHUNK_BYTES, Reason
from tests.support.fake_peer import FRAMES, LAST, chunk, fetched_from, listed, sending
from tests.support.tls_sites import (
    CHUNKS,
    CONTENT,
    DIGEST,
    GRID,
    MANIFEST,
    A,
    B,
    C,
    FakeHost,
    calling,
    hostile,
    offering,
    pins,
    serving,
)

pytestmark = pytest.mark.usefixtures("short_pauses")


@pytest.mark.parametrize("sent", [0, 1, 3, LAST])
@pytest.mark.parametrize("abruptly", [False, True])
def test_an_interrupted_transfer_resumes_at_the_next_chunk(
    tmp_path: Path, sent: int, abruptly: bool
) -> None:
    store = BlobStore(tmp_path / "store")

    async def interrupting(request: Any, context: Any) -> None:
        chunks = (chunk(i) for i in range(request.first_chunk, sent))
        await sending(listed(), *chunks)(request, context)
        if abruptly:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    error = fetched_from(interrupting, store)
    assert isinstance(error, PeerUnreachable)
    assert error.reason is Reason.TRUNCATED
    assert not store.has(DIGEST)
    assert store.partial_chunks(DIGEST, len(CONTENT)) == sent

    async def scenario() -> None:
        # After a restart of the receiver, over another connection.
        host, fresh = FakeHost(offering(tmp_path / "offered")), BlobStore(tmp_path / "store")
        async with serving(host) as (_, address), calling(address) as client:
            transfer = await client.fetch(MANIFEST, fresh, GRID)
            await host.until(lambda: len(host.transfers) == 1)
        assert host.calls == [("site-b", DIGEST)], "one request, for the missing chunks"
        rest = len(CONTENT) - sent * CHUNK_BYTES
        assert transfer.raw_bytes == rest
        assert host.transfers[0][1].raw_bytes == rest
        assert host.transfers[0][1].wire_bytes == sum(map(len, FRAMES[sent:]))
        assert fresh.verify(DIGEST)

    asyncio.run(scenario())


def test_each_retry_within_a_fetch_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FETCH_BACKOFF_S", 0.01)
    requested: list[int] = []

    async def two_at_a_time(request: Any, context: Any) -> None:
        first = request.first_chunk
        requested.append(first)
        chunks = (chunk(i) for i in range(first, min(first + 2, LAST + 1)))
        await sending(listed(), *chunks)(request, context)

    async def scenario() -> None:
        resumed: list[bool] = []
        store = BlobStore(tmp_path / "store")
        async with hostile(two_at_a_time) as address, calling(address) as client:
            await client.fetch(
                MANIFEST, store, GRID, on_resume=lambda: resumed.append(store.has(DIGEST))
            )
        assert store.verify(DIGEST)
        assert len(requested) > 2
        assert resumed == [False] * (len(requested) - 1), "once for every retry"

    asyncio.run(scenario())


def test_a_complete_partial_file_is_only_renamed(tmp_path: Path) -> None:
    async def scenario() -> None:
        host, store = FakeHost(offering(tmp_path / "offered")), BlobStore(tmp_path / "store")
        (store.folder / f"{DIGEST}.part").write_bytes(CONTENT)
        async with serving(host) as (_, address), calling(address) as client:
            transfer = await client.fetch(MANIFEST, store, GRID)
        assert (transfer.raw_bytes, transfer.wire_bytes) == (0, 0)
        assert store.verify(DIGEST)

    asyncio.run(scenario())


def test_a_damaged_partial_file_is_fetched_again_from_the_damaged_chunk(tmp_path: Path) -> None:
    async def scenario() -> None:
        host, store = FakeHost(offering(tmp_path / "offered")), BlobStore(tmp_path / "store")
        damaged = bytearray(CONTENT[: 4 * CHUNK_BYTES])
        damaged[CHUNK_BYTES + 9] ^= 1
        (store.folder / f"{DIGEST}.part").write_bytes(damaged)
        async with serving(host) as (_, address), calling(address) as client:
            transfer = await client.fetch(MANIFEST, store, GRID)
        assert transfer.raw_bytes == len(CONTENT) - CHUNK_BYTES
        assert store.verify(DIGEST)

    asyncio.run(scenario())


def test_a_stalled_fetch_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHUNK_READ_S", 0.5)

    async def silent(request: Any, context: Any) -> None:
        await sending(listed(), chunk(0))(request, context)
        await asyncio.Event().wait()

    error = fetched_from(silent, BlobStore(tmp_path))
    assert isinstance(error, PeerUnreachable)
    assert error.reason is Reason.TIMEOUT


def test_a_slow_fetch_does_not_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHUNK_READ_S", 2.0)

    async def slow(request: Any, context: Any) -> None:
        # Longer than the timeout in total, but not between two chunks.
        for piece in (listed(), *map(chunk, range(LAST + 1))):
            await asyncio.sleep(0.35)
            await context.write(piece)

    async def scenario() -> None:
        store = BlobStore(tmp_path)
        async with hostile(slow) as address, calling(address) as client:
            transfer = await client.fetch(MANIFEST, store, GRID)
        assert transfer.seconds > limits.CHUNK_READ_S
        assert store.verify(DIGEST)

    asyncio.run(scenario())


def test_a_stream_that_never_ends_is_complete_with_its_last_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CHUNK_READ_S", 1.0)

    async def endless(request: Any, context: Any) -> None:
        await sending(listed(), *(chunk(i) for i in range(len(CHUNKS))))(request, context)
        await asyncio.Event().wait()

    async def scenario() -> None:
        store = BlobStore(tmp_path)
        async with hostile(endless) as address, calling(address) as client:
            await client.fetch(MANIFEST, store, GRID)
        assert store.verify(DIGEST)

    asyncio.run(scenario())


def test_a_cancelled_fetch_can_be_resumed(tmp_path: Path) -> None:
    async def scenario() -> None:
        host, store = FakeHost(offering(tmp_path / "offered")), BlobStore(tmp_path / "store")
        started = asyncio.Event()

        async def stalling(request: Any, context: Any) -> None:
            await sending(listed(), chunk(0), chunk(1))(request, context)
            await asyncio.Event().wait()

        async with hostile(stalling) as address, calling(address) as client:
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(
                    client.fetch(
                        MANIFEST,
                        store,
                        GRID,
                        lambda done, total: started.set() if done else None,
                    )
                )
                async with asyncio.timeout(20):
                    await started.wait()
                task.cancel()
            assert task.cancelled()
        assert store.partial_chunks(DIGEST, len(CONTENT)) >= 1
        async with serving(host) as (_, address), calling(address) as client:
            transfer = await client.fetch(MANIFEST, store, GRID)
        assert transfer.raw_bytes < len(CONTENT)
        assert store.verify(DIGEST)

    asyncio.run(scenario())


def test_a_fetch_cancelled_while_it_opens_its_file_closes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, may_continue = threading.Event(), threading.Event()
    actual = IncomingBlob.open

    def slow_open(*arguments: Any) -> IncomingBlob:
        opening.set()
        assert may_continue.wait(20)
        return actual(*arguments)

    monkeypatch.setattr(IncomingBlob, "open", slow_open)

    async def scenario() -> None:
        host, store = FakeHost(offering(tmp_path / "offered")), BlobStore(tmp_path / "store")
        async with serving(host) as (_, address), calling(address) as client:
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(client.fetch(MANIFEST, store, GRID))
                assert await asyncio.to_thread(opening.wait, 20)
                task.cancel()
            assert task.cancelled()
            may_continue.set()
            async with asyncio.timeout(20):
                while not store.has(DIGEST):
                    # Refused until the first fetch has closed its file.
                    with contextlib.suppress(PeerUnreachable):
                        await client.fetch(MANIFEST, store, GRID)

    asyncio.run(scenario())


def test_cancelled_fetches_leak_no_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC would leak a chunk for every cancelled read."""
    monkeypatch.setattr(limits, "CALLS_BURST", 1000)

    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")

    async def cancelled_fetches(count: int) -> int:
        host, store = FakeHost(offering(tmp_path / "offered")), BlobStore(tmp_path / "store")
        async with serving(host) as (_, address), calling(address) as client:
            for _ in range(count):
                started = asyncio.Event()
                async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
                    task = tasks.create_task(
                        client.fetch(MANIFEST, store, GRID, lambda *_, event=started: event.set())
                    )
                    await started.wait()
                    task.cancel()
                store.retain(set())
            return resident_bytes()

    warm = asyncio.run(cancelled_fetches(30))
    assert asyncio.run(cancelled_fetches(60)) - warm < 30 * CHUNK_BYTES
    assert "never retrieved" not in caplog.text


def test_withdrawing_a_pin_ends_a_running_transfer(tmp_path: Path) -> None:
    async def scenario() -> None:
        host, store = FakeHost(offering(tmp_path / "offered")), BlobStore(tmp_path / "store")
        async with serving(host, peers=(B, C)) as (server, address), calling(address, B) as client:

            def withdraw(done: int, total: int) -> None:
                if done == CHUNK_BYTES:
                    server.set_credentials(A, pins(C))

            # The connection is closed, and a new one with the old certificate is refused.
            with pytest.raises(PeerUnreachable):
                await client.fetch(MANIFEST, store, GRID, withdraw)
        assert host.transfers == []
        assert not store.has(DIGEST)

    asyncio.run(scenario())
