"""An update is encoded once for all peers, whatever the order of their requests."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.errors import DamagedFile
from lightyear_node.storage.blobs import hash_file, read_chunk
from lightyear_node.transport import upload_cache as module
from lightyear_node.transport.codec import decode_chunk, encode_chunk
from lightyear_node.transport.limits import ENCODED_UPLOADS_KEPT
from lightyear_node.transport.upload_cache import Upload, UploadBase, UploadCache
from tests.support.tls_sites import CHUNKS, CONTENT, DIGEST, GRID, HASHES, HEADER, flip, near

LAST = len(CHUNKS) - 1
BASE = near(CONTENT, HEADER)
BASE_CHUNKS = [BASE[i << 20 : (i + 1) << 20] for i in range(len(CHUNKS))]


@pytest.fixture
def uploads(tmp_path: Path) -> Iterator[UploadCache]:
    opened = UploadCache(tmp_path)
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


def upload_in(folder: Path, base: bytes | None = None, name: str = "update") -> Upload:
    (folder / name).write_bytes(CONTENT)
    if base is not None:
        (folder / "base").write_bytes(base)
    known = UploadBase(folder / "base", hash_file(folder / "base")[2]) if base else None
    return Upload(DIGEST, folder / name, HASHES, GRID, known)


def test_all_peers_get_the_same_bytes_from_one_encoding(
    uploads: UploadCache, tmp_path: Path, encoded: list[int]
) -> None:
    upload = upload_in(tmp_path)

    async def peer() -> list[bytes]:
        with uploads.open(upload, delta=False) as encoded_upload:
            return [await encoded_upload.frame(index) for index in range(len(CHUNKS))]

    async def scenario() -> list[list[bytes]]:
        together = await asyncio.gather(peer(), peer(), peer())
        return [*together, await peer()]

    first, *others = asyncio.run(scenario())
    assert all(frames == first for frames in others)
    assert [bytes(decode_chunk(GRID, i, frame)) for i, frame in enumerate(first)] == CHUNKS
    assert encoded == list(range(len(CHUNKS)))


def test_a_request_for_a_late_chunk_encodes_each_chunk_once(
    uploads: UploadCache, tmp_path: Path, encoded: list[int]
) -> None:
    async def scenario() -> bytes:
        with uploads.open(upload_in(tmp_path), delta=False) as encoded_upload:
            last = await encoded_upload.frame(LAST)
            await encoded_upload.frame(0)
            return last

    assert decode_chunk(GRID, LAST, asyncio.run(scenario())) == CHUNKS[LAST]
    assert encoded == list(range(len(CHUNKS)))


def test_differences_are_sent_only_on_request(uploads: UploadCache, tmp_path: Path) -> None:
    async def scenario() -> tuple[bytes, bytes]:
        upload = upload_in(tmp_path, BASE)
        with uploads.open(upload, delta=True) as delta, uploads.open(upload, delta=False) as full:
            return await delta.frame(1), await full.frame(1)

    delta, full = asyncio.run(scenario())
    assert len(delta) < 0.7 * len(full)
    assert decode_chunk(GRID, 1, delta, BASE_CHUNKS[1]) == CHUNKS[1]
    assert decode_chunk(GRID, 1, full) == CHUNKS[1]


@pytest.mark.parametrize("left", [None, BASE[:-1]], ids=["deleted", "truncated"])
def test_without_its_base_an_update_is_sent_in_full(
    uploads: UploadCache, tmp_path: Path, left: bytes | None
) -> None:
    upload = upload_in(tmp_path, BASE)
    assert upload.base is not None
    if left is None:
        upload.base.path.unlink()
    else:
        upload.base.path.write_bytes(left)

    async def scenario() -> bytes:
        with uploads.open(upload, delta=True) as encoded_upload:
            return await encoded_upload.frame(LAST)

    assert decode_chunk(GRID, LAST, asyncio.run(scenario())) == CHUNKS[LAST]


def test_an_update_deleted_meanwhile_is_still_sent(uploads: UploadCache, tmp_path: Path) -> None:
    async def scenario() -> list[bytes]:
        upload = upload_in(tmp_path)
        with uploads.open(upload, delta=False) as encoded_upload:
            upload.path.unlink()
            return [await encoded_upload.frame(index) for index in range(len(CHUNKS))]

    frames = asyncio.run(scenario())
    assert [bytes(decode_chunk(GRID, i, frame)) for i, frame in enumerate(frames)] == CHUNKS


def test_a_cancelled_reader_leaves_a_valid_copy(
    uploads: UploadCache, tmp_path: Path, encoded: list[int]
) -> None:
    async def scenario() -> list[bytes]:
        with uploads.open(upload_in(tmp_path), delta=False) as encoded_upload:
            for index in range(len(CHUNKS)):
                reader = asyncio.get_running_loop().create_task(encoded_upload.frame(index))
                await asyncio.sleep(0)
                reader.cancel()
                await asyncio.wait([reader])
            return [await encoded_upload.frame(index) for index in range(len(CHUNKS))]

    frames = asyncio.run(scenario())
    assert [bytes(decode_chunk(GRID, i, frame)) for i, frame in enumerate(frames)] == CHUNKS
    assert encoded == list(range(len(CHUNKS)))


def test_on_a_full_disk_updates_are_encoded_again(
    uploads: UploadCache,
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
        with uploads.open(upload_in(tmp_path), delta=False) as encoded_upload:
            return [await encoded_upload.frame(index) for index in range(len(CHUNKS))]

    frames = asyncio.run(scenario())
    assert [bytes(decode_chunk(GRID, i, frame)) for i, frame in enumerate(frames)] == CHUNKS
    assert caplog.text.count("No space left") == 1


def test_updates_are_sent_even_if_no_file_can_be_created(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uploads = UploadCache(tmp_path / "not-there")

    async def scenario() -> bytes:
        with uploads.open(upload_in(tmp_path), delta=False) as encoded_upload:
            return await encoded_upload.frame(LAST)

    assert decode_chunk(GRID, LAST, asyncio.run(scenario())) == CHUNKS[LAST]
    assert "cannot be kept" in caplog.text
    uploads.close()


def test_unused_copies_are_closed(uploads: UploadCache, tmp_path: Path) -> None:
    async def scenario() -> None:
        before = len(os.listdir("/dev/fd"))
        for number in range(10):
            upload = upload_in(tmp_path, name=f"update-{number}")
            named = Upload(module.Digest(f"{number:064x}"), upload.path, HASHES, GRID)
            with uploads.open(named, delta=False) as encoded_upload:
                await encoded_upload.frame(0)
        # The update itself and its encoded copy, which is unlinked.
        assert len(os.listdir("/dev/fd")) - before <= 2 * ENCODED_UPLOADS_KEPT

    asyncio.run(scenario())
    assert len(list(tmp_path.iterdir())) == 10, "copies are unlinked"


def test_idle_copies_can_be_dropped_and_are_encoded_again(
    uploads: UploadCache, tmp_path: Path, encoded: list[int]
) -> None:
    upload = upload_in(tmp_path)

    async def scenario() -> None:
        with uploads.open(upload, delta=False) as encoded_upload:
            first = await encoded_upload.frame(0)
            uploads.drop_idle()
            assert await encoded_upload.frame(0) == first, "a copy in use is kept"
        assert encoded == [0]
        uploads.drop_idle()
        with uploads.open(upload, delta=False) as encoded_upload:
            assert await encoded_upload.frame(0) == first
        assert encoded == [0, 0]

    asyncio.run(scenario())


def test_damaged_chunks_are_never_sent(uploads: UploadCache, tmp_path: Path) -> None:
    upload = upload_in(tmp_path)
    flip(upload.path, 2 * len(CHUNKS[0]) + 77)

    async def scenario() -> None:
        with uploads.open(upload, delta=False) as encoded_upload:
            assert decode_chunk(GRID, 1, await encoded_upload.frame(1)) == CHUNKS[1]
            for _ in range(2):
                with pytest.raises(DamagedFile, match="chunk 2"):
                    await encoded_upload.frame(2)

    asyncio.run(scenario())


def test_damage_found_after_the_caller_was_cancelled_is_not_logged(
    uploads: UploadCache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A stream may end while the next chunk is being encoded."""
    flip((upload := upload_in(tmp_path)).path, 77)
    cancelled = threading.Event()

    def late(*arguments: Any) -> bytes:
        assert cancelled.wait(10)
        return read_chunk(*arguments)

    monkeypatch.setattr(module, "read_chunk", late)

    async def scenario() -> None:
        with uploads.open(upload, delta=False) as encoded_upload:
            reading = asyncio.get_running_loop().create_task(encoded_upload.frame(0))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.sleep(0)
            cancelled.set()
            with pytest.raises(asyncio.CancelledError):
                await reading

    asyncio.run(scenario())
    gc.collect()
    assert caplog.text == ""


def test_a_damaged_base_is_not_used(
    uploads: UploadCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    upload = upload_in(tmp_path, BASE)
    assert upload.base is not None
    flip(upload.base.path, len(CHUNKS[0]) + 77)

    async def scenario() -> list[bytes]:
        with uploads.open(upload, delta=True) as encoded_upload:
            return [await encoded_upload.frame(index) for index in range(len(CHUNKS))]

    frames = asyncio.run(scenario())
    decoded = [decode_chunk(GRID, i, f, BASE_CHUNKS[i]) for i, f in enumerate(frames)]
    assert [bytes(chunk) for chunk in decoded] == CHUNKS
    assert "sent in full" in caplog.text


def test_an_encoded_copy_damaged_on_disk_is_encoded_again(
    uploads: UploadCache, tmp_path: Path, encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    actual = os.pwrite

    def damaging(fd: int, frame: bytes, at: int) -> int:
        return actual(fd, bytes([frame[0]]) + bytes(len(frame) - 1), at)

    monkeypatch.setattr(os, "pwrite", damaging)

    async def scenario() -> bytes:
        with uploads.open(upload_in(tmp_path), delta=False) as encoded_upload:
            return await encoded_upload.frame(0)

    assert decode_chunk(GRID, 0, asyncio.run(scenario())) == CHUNKS[0]
    assert encoded == [0, 0]
