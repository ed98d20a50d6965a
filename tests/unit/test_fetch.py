"""Pulling an update: from an honest peer, over a bad line, and from a hostile member."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import zstandard

from lightyear_node.errors import (
    DiskFull,
    PeerError,
    PeerMisbehaved,
    PeerUnreachable,
    StoreError,
)
from lightyear_node.records import CHUNK_BYTES, Digest, Reason
from lightyear_node.store import Incoming, Store
from lightyear_node.transport import limits
from lightyear_node.transport.codec import Grid, encode_chunk
from lightyear_node.v1 import exchange_pb2 as pb

from .sites import (
    CHUNKS,
    CONTENT,
    DIGEST,
    ELEMENTS,
    GRID,
    HASHES,
    HEADER,
    MANIFEST,
    A,
    B,
    C,
    FakeHost,
    calling,
    frame_of,
    header_of,
    hostile,
    near,
    offering,
    pins,
    raw_stub,
    serving,
)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FETCH_PAUSE_S", 0.02)


Fetch = Callable[[Any, Any], Awaitable[None]]
FRAMES = [encode_chunk(GRID, index, chunk) for index, chunk in enumerate(CHUNKS)]
LAST = len(CHUNKS) - 1


def listed(raw_bytes: int = len(CONTENT), sha256: bytes = b"".join(HASHES)) -> Any:
    return pb.Piece(list=pb.ChunkList(raw_bytes=raw_bytes, sha256=sha256))


def chunk(index: int, frame: bytes | None = None) -> Any:
    return pb.Piece(chunk=pb.Chunk(index=index, frame=FRAMES[index] if frame is None else frame))


def sending(*pieces: Any) -> Fetch:
    """A peer that sends these pieces, whatever was asked for, and ends the stream."""

    async def fetch(request: Any, context: Any) -> None:
        for piece in pieces:
            await context.write(piece)

    return fetch


def fetched_from(fetch: Fetch, store: Store, grid: Grid = GRID) -> PeerError:
    """The error with which a fetch from a hostile peer ends."""

    async def scenario() -> PeerError:
        async with hostile(fetch) as address, calling(address) as client:
            with pytest.raises(PeerError) as caught:
                await client.fetch(MANIFEST, store, grid)
        return caught.value

    return asyncio.run(scenario())


# -- an honest peer -------------------------------------------------------------------------------


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


# -- a bad line -----------------------------------------------------------------------------------


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


# -- a hostile member -----------------------------------------------------------------------------

SWAPPED = b"".join((HASHES[1], HASHES[0], *HASHES[2:]))
BOMB = frame_of(*[(1, zstandard.compress(bytes(256 << 20)))] * 4)
OTHER = encode_chunk(GRID, 0, CHUNKS[1])


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        pytest.param([listed(sha256=SWAPPED)], Reason.CHECKSUM, id="list of another digest"),
        pytest.param([listed(sha256=b"".join(HASHES[:-1]))], Reason.MALFORMED, id="short list"),
        pytest.param([listed(raw_bytes=len(CONTENT) - 1)], Reason.CHECKSUM, id="shorter"),
        pytest.param([listed(raw_bytes=len(CONTENT) + 1)], Reason.TOO_LARGE, id="longer"),
        pytest.param([listed(raw_bytes=2**60)], Reason.MALFORMED, id="exbibyte"),
        pytest.param([chunk(0)], Reason.MALFORMED, id="no list"),
        pytest.param([listed(), listed()], Reason.MALFORMED, id="two lists"),
        pytest.param([listed(), pb.Piece()], Reason.MALFORMED, id="empty piece"),
        pytest.param([listed(), chunk(1)], Reason.MALFORMED, id="out of order"),
        pytest.param([listed(), chunk(0), chunk(0)], Reason.MALFORMED, id="repeated"),
        pytest.param([listed(), chunk(0, OTHER)], Reason.CHECKSUM, id="other chunk"),
        pytest.param([listed(), chunk(0), chunk(1, BOMB)], Reason.TOO_LARGE, id="bomb"),
        pytest.param(
            [listed(), chunk(0, FRAMES[0] + b"x")], Reason.MALFORMED, id="garbage after frame"
        ),
        pytest.param([listed(), chunk(0, FRAMES[0][:-9])], Reason.MALFORMED, id="cut frame"),
        pytest.param([listed(), chunk(0, b"")], Reason.MALFORMED, id="empty frame"),
        pytest.param([listed(), chunk(0, bytes(3 << 19))], Reason.TOO_LARGE, id="large frame"),
        # Were it received at all, it would be malformed.
        pytest.param([listed(sha256=bytes(3 << 20))], Reason.TOO_LARGE, id="large message"),
        pytest.param(
            [listed(), *map(chunk, range(LAST + 1)), chunk(0)], Reason.TOO_LARGE, id="one too many"
        ),
    ],
)
def test_what_a_hostile_member_sends_is_refused_by_name(
    tmp_path: Path, pieces: list[Any], reason: Reason
) -> None:
    store = Store(tmp_path)
    error = fetched_from(sending(*pieces), store)
    assert isinstance(error, PeerMisbehaved)
    assert error.reason is reason
    assert str(error).startswith("site-a: ")
    assert not store.has(DIGEST)
    part = tmp_path / f"{DIGEST}.part"
    if part.exists():
        assert CONTENT.startswith(part.read_bytes()), "only verified bytes are kept"


def test_a_bad_chunk_outranks_the_broken_line_behind_it(tmp_path: Path) -> None:
    async def bad_then_gone(request: Any, context: Any) -> None:
        await sending(listed(), chunk(0, OTHER))(request, context)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    error = fetched_from(bad_then_gone, Store(tmp_path))
    assert isinstance(error, PeerMisbehaved)
    assert error.reason is Reason.CHECKSUM


def test_weights_of_another_header_never_pass_for_ours(tmp_path: Path) -> None:
    """The header does not even travel: with ours in its place the chunk has another hash."""
    store = Store(tmp_path)
    pieces = [listed(), *map(chunk, range(LAST + 1))]
    error = fetched_from(sending(*pieces), store, grid=Grid(header_of("v", ELEMENTS)))
    assert isinstance(error, PeerMisbehaved)
    assert error.reason is Reason.CHECKSUM
    assert not store.has(DIGEST)
    assert store.partial_chunks(DIGEST, len(CONTENT)) == 0


def test_nothing_at_all_is_a_broken_line(tmp_path: Path) -> None:
    error = fetched_from(sending(), Store(tmp_path))
    assert isinstance(error, PeerUnreachable)
    assert error.reason is Reason.TRUNCATED


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
