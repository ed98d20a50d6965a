"""Pulling an update over a bad line: cut, silent, slow, cancelled; nothing comes twice."""

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
from lightyear_node.records import CHUNK_BYTES, Reason
from lightyear_node.store import Incoming, Store
from lightyear_node.transport import limits

from .pieces import FRAMES, LAST, chunk, fetched_from, listed, sending
from .sites import (
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


@pytest.mark.parametrize("cut", [0, 1, 3, LAST])
@pytest.mark.parametrize("abruptly", [False, True])
def test_a_cut_transfer_goes_on_at_the_next_chunk(tmp_path: Path, cut: int, abruptly: bool) -> None:
    store = Store(tmp_path / "store")

    async def cutting(request: Any, context: Any) -> None:
        chunks = (chunk(i) for i in range(request.first_chunk, cut))
        await sending(listed(), *chunks)(request, context)
        if abruptly:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    error = fetched_from(cutting, store)
    assert isinstance(error, PeerUnreachable)
    assert error.reason is Reason.TRUNCATED
    assert not store.has(DIGEST)
    assert store.partial_chunks(DIGEST, len(CONTENT)) == cut

    async def scenario() -> None:
        # Another life of the receiver, another connection.
        host, fresh = FakeHost(offering(tmp_path / "offered")), Store(tmp_path / "store")
        async with serving(host) as (_, address), calling(address) as client:
            transfer = await client.fetch(MANIFEST, fresh, GRID)
            await host.until(lambda: len(host.transfers) == 1)
        assert host.heard == [("site-b", DIGEST)], "asked once, for what is missing"
        rest = len(CONTENT) - cut * CHUNK_BYTES
        assert transfer.raw_bytes == rest
        assert host.transfers[0][1].raw_bytes == rest
        assert host.transfers[0][1].wire_bytes == sum(map(len, FRAMES[cut:]))
        assert fresh.verify(DIGEST)

    asyncio.run(scenario())


def test_a_break_that_is_mended_within_a_fetch_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FETCH_PAUSE_S", 0.01)
    asked: list[int] = []

    async def two_at_a_time(request: Any, context: Any) -> None:
        first = request.first_chunk
        asked.append(first)
        chunks = (chunk(i) for i in range(first, min(first + 2, LAST + 1)))
        await sending(listed(), *chunks)(request, context)

    async def scenario() -> None:
        resumed: list[bool] = []
        store = Store(tmp_path / "store")
        async with hostile(two_at_a_time) as address, calling(address) as client:
            await client.fetch(
                MANIFEST, store, GRID, on_resume=lambda: resumed.append(store.has(DIGEST))
            )
        assert store.verify(DIGEST)
        assert len(asked) > 2
        assert resumed == [False] * (len(asked) - 1), "each time it was asked again"

    asyncio.run(scenario())


def test_a_part_that_was_complete_needs_only_its_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        host, store = FakeHost(offering(tmp_path / "offered")), Store(tmp_path / "store")
        (store.folder / f"{DIGEST}.part").write_bytes(CONTENT)
        async with serving(host) as (_, address), calling(address) as client:
            transfer = await client.fetch(MANIFEST, store, GRID)
        assert (transfer.raw_bytes, transfer.wire_bytes) == (0, 0)
        assert store.verify(DIGEST)

    asyncio.run(scenario())


def test_a_damaged_part_is_fetched_from_the_damage_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        host, store = FakeHost(offering(tmp_path / "offered")), Store(tmp_path / "store")
        damaged = bytearray(CONTENT[: 4 * CHUNK_BYTES])
        damaged[CHUNK_BYTES + 9] ^= 1
        (store.folder / f"{DIGEST}.part").write_bytes(damaged)
        async with serving(host) as (_, address), calling(address) as client:
            transfer = await client.fetch(MANIFEST, store, GRID)
        assert transfer.raw_bytes == len(CONTENT) - CHUNK_BYTES
        assert store.verify(DIGEST)

    asyncio.run(scenario())


def test_silence_ends_a_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHUNK_READ_S", 0.5)

    async def silent(request: Any, context: Any) -> None:
        await sending(listed(), chunk(0))(request, context)
        await asyncio.Event().wait()

    error = fetched_from(silent, Store(tmp_path))
    assert isinstance(error, PeerUnreachable)
    assert error.reason is Reason.TIMEOUT


def test_slowness_does_not_end_a_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHUNK_READ_S", 2.0)

    async def slow(request: Any, context: Any) -> None:
        # In all longer than the limit, but never so long without a chunk.
        for piece in (listed(), *map(chunk, range(LAST + 1))):
            await asyncio.sleep(0.35)
            await context.write(piece)

    async def scenario() -> None:
        store = Store(tmp_path)
        async with hostile(slow) as address, calling(address) as client:
            transfer = await client.fetch(MANIFEST, store, GRID)
        assert transfer.seconds > limits.CHUNK_READ_S
        assert store.verify(DIGEST)

    asyncio.run(scenario())


def test_a_peer_that_never_ends_the_stream_gains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CHUNK_READ_S", 1.0)

    async def endless(request: Any, context: Any) -> None:
        await sending(listed(), *(chunk(i) for i in range(len(CHUNKS))))(request, context)
        await asyncio.Event().wait()

    async def scenario() -> None:
        store = Store(tmp_path)
        async with hostile(endless) as address, calling(address) as client:
            await client.fetch(MANIFEST, store, GRID)
        assert store.verify(DIGEST)

    asyncio.run(scenario())


def test_a_cancelled_fetch_is_cancelled_and_can_be_resumed(tmp_path: Path) -> None:
    async def scenario() -> None:
        host, store = FakeHost(offering(tmp_path / "offered")), Store(tmp_path / "store")
        begun = asyncio.Event()

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
                        lambda done, total: begun.set() if done else None,
                    )
                )
                async with asyncio.timeout(20):
                    await begun.wait()
                task.cancel()
            assert task.cancelled()
        assert store.partial_chunks(DIGEST, len(CONTENT)) >= 1
        async with serving(host) as (_, address), calling(address) as client:
            transfer = await client.fetch(MANIFEST, store, GRID)
        assert transfer.raw_bytes < len(CONTENT)
        assert store.verify(DIGEST)

    asyncio.run(scenario())


def test_a_fetch_cancelled_while_it_opens_its_file_gives_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, go_on = threading.Event(), threading.Event()
    actual = Incoming.open

    def slow_open(*arguments: Any) -> Incoming:
        opening.set()
        assert go_on.wait(20)
        return actual(*arguments)

    monkeypatch.setattr(Incoming, "open", slow_open)

    async def scenario() -> None:
        host, store = FakeHost(offering(tmp_path / "offered")), Store(tmp_path / "store")
        async with serving(host) as (_, address), calling(address) as client:
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(client.fetch(MANIFEST, store, GRID))
                assert await asyncio.to_thread(opening.wait, 20)
                task.cancel()
            assert task.cancelled()
            go_on.set()
            async with asyncio.timeout(20):
                while not store.has(DIGEST):
                    # Until the first has closed its file, it is said to be arriving.
                    with contextlib.suppress(PeerUnreachable):
                        await client.fetch(MANIFEST, store, GRID)

    asyncio.run(scenario())


def test_cancelled_fetches_leave_no_memory_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC would leak a chunk for every read that is abandoned half-way."""
    monkeypatch.setattr(limits, "CALLS_BURST", 1000)

    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")

    async def cancelled_fetches(count: int) -> int:
        host, store = FakeHost(offering(tmp_path / "offered")), Store(tmp_path / "store")
        async with serving(host) as (_, address), calling(address) as client:
            for _ in range(count):
                begun = asyncio.Event()
                async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
                    task = tasks.create_task(
                        client.fetch(MANIFEST, store, GRID, lambda *_, begun=begun: begun.set())
                    )
                    await begun.wait()
                    task.cancel()
                store.retain(set())
            return resident_bytes()

    warm = asyncio.run(cancelled_fetches(30))
    assert asyncio.run(cancelled_fetches(60)) - warm < 30 * CHUNK_BYTES
    assert "never retrieved" not in caplog.text


def test_withdrawing_the_pin_ends_a_transfer_that_is_under_way(tmp_path: Path) -> None:
    async def scenario() -> None:
        host, store = FakeHost(offering(tmp_path / "offered")), Store(tmp_path / "store")
        async with serving(host, peers=(B, C)) as (server, address), calling(address, B) as client:

            def withdraw(done: int, total: int) -> None:
                if done == CHUNK_BYTES:
                    server.admit(A, pins(C))

            # The connection is cut, and with the old certificate there is no other.
            with pytest.raises(PeerUnreachable):
                await client.fetch(MANIFEST, store, GRID, withdraw)
        assert host.transfers == []
        assert not store.has(DIGEST)

    asyncio.run(scenario())
