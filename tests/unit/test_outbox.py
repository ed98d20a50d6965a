"""An update is encoded once, however many peers fetch it, and in whatever order."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.transport import outbox as module
from lightyear_node.transport.codec import decode_chunk, encode_chunk
from lightyear_node.transport.outbox import COPIES_KEPT, Offer, Outbox

from .sites import CHUNKS, CONTENT, DIGEST, GRID, HASHES, HEADER, near

LAST = len(CHUNKS) - 1
BASE = near(CONTENT, HEADER)
BASE_CHUNKS = [BASE[i << 20 : (i + 1) << 20] for i in range(len(CHUNKS))]


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    opened = Outbox(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The chunks that were encoded, in order."""
    indices: list[int] = []

    def counting(grid: Any, index: int, *rest: Any) -> bytes:
        indices.append(index)
        return encode_chunk(grid, index, *rest)

    monkeypatch.setattr(module, "encode_chunk", counting)
    return indices


def offer_in(folder: Path, base: bytes | None = None, name: str = "update") -> Offer:
    (folder / name).write_bytes(CONTENT)
    if base is not None:
        (folder / "base").write_bytes(base)
    return Offer(DIGEST, folder / name, HASHES, GRID, folder / "base" if base else None)


def test_all_peers_get_the_same_bytes_from_one_encoding(
    outbox: Outbox, tmp_path: Path, encoded: list[int]
) -> None:
    offer = offer_in(tmp_path)

    async def peer() -> list[bytes]:
        with outbox.lend(offer, delta=False) as copy:
            return [await copy.frame(index) for index in range(len(CHUNKS))]

    async def scenario() -> list[list[bytes]]:
        together = await asyncio.gather(peer(), peer(), peer())
        return [*together, await peer()]

    first, *others = asyncio.run(scenario())
    assert all(frames == first for frames in others)
    assert [bytes(decode_chunk(GRID, i, frame)) for i, frame in enumerate(first)] == CHUNKS
    assert encoded == list(range(len(CHUNKS)))


def test_who_resumes_far_ahead_waits_for_no_more_than_that(
    outbox: Outbox, tmp_path: Path, encoded: list[int]
) -> None:
    async def scenario() -> bytes:
        with outbox.lend(offer_in(tmp_path), delta=False) as copy:
            last = await copy.frame(LAST)
            await copy.frame(0)
            return last

    assert decode_chunk(GRID, LAST, asyncio.run(scenario())) == CHUNKS[LAST]
    assert encoded == list(range(len(CHUNKS)))


def test_differences_are_for_who_has_the_base(outbox: Outbox, tmp_path: Path) -> None:
    async def scenario() -> tuple[bytes, bytes]:
        offer = offer_in(tmp_path, BASE)
        with outbox.lend(offer, delta=True) as delta, outbox.lend(offer, delta=False) as full:
            return await delta.frame(1), await full.frame(1)

    delta, full = asyncio.run(scenario())
    assert len(delta) < 0.7 * len(full)
    assert decode_chunk(GRID, 1, delta, BASE_CHUNKS[1]) == CHUNKS[1]
    assert decode_chunk(GRID, 1, full) == CHUNKS[1]


@pytest.mark.parametrize("left", [None, BASE[:-1]], ids=["gone", "cut short"])
def test_without_its_base_an_update_is_sent_whole(
    outbox: Outbox, tmp_path: Path, left: bytes | None
) -> None:
    offer = offer_in(tmp_path, BASE)
    assert offer.base is not None
    if left is None:
        offer.base.unlink()
    else:
        offer.base.write_bytes(left)

    async def scenario() -> bytes:
        with outbox.lend(offer, delta=True) as copy:
            return await copy.frame(LAST)

    assert decode_chunk(GRID, LAST, asyncio.run(scenario())) == CHUNKS[LAST]


def test_a_deleted_update_is_sent_to_the_end(outbox: Outbox, tmp_path: Path) -> None:
    async def scenario() -> list[bytes]:
        offer = offer_in(tmp_path)
        with outbox.lend(offer, delta=False) as copy:
            offer.path.unlink()
            return [await copy.frame(index) for index in range(len(CHUNKS))]

    frames = asyncio.run(scenario())
    assert [bytes(decode_chunk(GRID, i, frame)) for i, frame in enumerate(frames)] == CHUNKS


def test_a_cancelled_reader_leaves_a_sound_copy(
    outbox: Outbox, tmp_path: Path, encoded: list[int]
) -> None:
    async def scenario() -> list[bytes]:
        with outbox.lend(offer_in(tmp_path), delta=False) as copy:
            for index in range(len(CHUNKS)):
                reader = asyncio.get_running_loop().create_task(copy.frame(index))
                await asyncio.sleep(0)
                reader.cancel()
                await asyncio.wait([reader])
            return [await copy.frame(index) for index in range(len(CHUNKS))]

    frames = asyncio.run(scenario())
    assert [bytes(decode_chunk(GRID, i, frame)) for i, frame in enumerate(frames)] == CHUNKS
    assert encoded == list(range(len(CHUNKS)))


def test_a_full_disk_costs_work_and_nothing_else(
    outbox: Outbox,
    tmp_path: Path,
    encoded: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    room = [2]

    def full(*arguments: Any) -> int:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(28, "No space left on device")
        return actual(*arguments)

    actual = os.pwrite
    monkeypatch.setattr(os, "pwrite", full)

    async def scenario() -> list[bytes]:
        with outbox.lend(offer_in(tmp_path), delta=False) as copy:
            return [await copy.frame(index) for index in range(len(CHUNKS))]

    frames = asyncio.run(scenario())
    assert [bytes(decode_chunk(GRID, i, frame)) for i, frame in enumerate(frames)] == CHUNKS
    assert caplog.text.count("No space left") == 1


def test_where_no_file_can_be_made_updates_are_sent_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = Outbox(tmp_path / "not-there")

    async def scenario() -> bytes:
        with outbox.lend(offer_in(tmp_path), delta=False) as copy:
            return await copy.frame(LAST)

    assert decode_chunk(GRID, LAST, asyncio.run(scenario())) == CHUNKS[LAST]
    assert "cannot be kept" in caplog.text
    outbox.close()


def test_copies_that_nobody_asks_for_are_closed(outbox: Outbox, tmp_path: Path) -> None:
    async def scenario() -> None:
        before = len(os.listdir("/dev/fd"))
        for number in range(10):
            offer = offer_in(tmp_path, name=f"update-{number}")
            named = Offer(module.Digest(f"{number:064x}"), offer.path, HASHES, GRID)
            with outbox.lend(named, delta=False) as copy:
                await copy.frame(0)
        # The update itself and its encoded copy; none of them has a name.
        assert len(os.listdir("/dev/fd")) - before <= 2 * COPIES_KEPT

    asyncio.run(scenario())
    assert len(list(tmp_path.iterdir())) == 10, "copies have no names"


def test_on_a_full_disk_idle_copies_go_and_are_made_again(
    outbox: Outbox, tmp_path: Path, encoded: list[int]
) -> None:
    offer = offer_in(tmp_path)

    async def scenario() -> None:
        with outbox.lend(offer, delta=False) as copy:
            first = await copy.frame(0)
            outbox.shed()
            assert await copy.frame(0) == first, "what is being sent stays"
        assert encoded == [0]
        outbox.shed()
        with outbox.lend(offer, delta=False) as copy:
            assert await copy.frame(0) == first
        assert encoded == [0, 0]

    asyncio.run(scenario())
