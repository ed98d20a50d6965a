"""A file with the name of a digest has that content, after any crash."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightyear_node.errors import DiskFull, StoreError
from lightyear_node.storage import blobs as store_module
from lightyear_node.storage.blobs import (
    AlreadyDownloading,
    BlobStore,
    ChunkRefused,
    IncomingBlob,
    chunk_count,
    hash_file,
    tree_digest,
)
from lightyear_node.types import CHUNK_BYTES, Digest, Reason

HEADER = b"\x10\0\0\0\0\0\0\0" + b'{"w":"float32"} '
CONTENT = HEADER + os.urandom(3 * CHUNK_BYTES - 1000)
CHUNKS = [CONTENT[i : i + CHUNK_BYTES] for i in range(0, len(CONTENT), CHUNK_BYTES)]
HASHES = tuple(hashlib.sha256(chunk).digest() for chunk in CHUNKS)
DIGEST = tree_digest(len(CONTENT), HASHES)


def begin(store: BlobStore, **changed: Any) -> IncomingBlob:
    arguments: dict[str, Any] = {
        "digest": DIGEST,
        "raw_bytes": len(CONTENT),
        "chunk_digests": HASHES,
    }
    return IncomingBlob.open(store, **{**arguments, **changed})


def placed(store: BlobStore, content: bytes) -> Digest:
    path = store.scratch_path()
    path.write_bytes(content)
    return store.adopt(path).digest


# -- the digest -----------------------------------------------------------------------------------


def test_tree_digest_is_the_documented_one() -> None:
    expected = hashlib.sha256(
        b"LYTREE1\0" + len(CONTENT).to_bytes(8, "little") + b"".join(HASHES)
    ).hexdigest()
    assert expected == DIGEST
    assert tree_digest(0, []) == hashlib.sha256(b"LYTREE1\0" + bytes(8)).hexdigest()


@pytest.mark.parametrize(
    "size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES]
)
def test_hash_file_agrees_with_hashing_in_memory(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    digest, raw_bytes, hashes = hash_file(tmp_path / "file")
    pieces = [content[i : i + CHUNK_BYTES] for i in range(0, size, CHUNK_BYTES)]
    assert raw_bytes == size
    assert hashes == tuple(hashlib.sha256(piece).digest() for piece in pieces)
    assert len(hashes) == chunk_count(size)
    assert digest == tree_digest(size, hashes)


# -- complete files -------------------------------------------------------------------------------


def test_adopted_file_is_found_by_its_content(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "models", ".safetensors")
    temp = store.scratch_path()
    temp.write_bytes(CONTENT)
    stored = store.adopt(temp)
    assert (stored.digest, stored.raw_bytes) == (DIGEST, len(CONTENT))
    assert store.has(DIGEST)
    assert store.path(DIGEST) == tmp_path / "models" / f"{DIGEST}.safetensors"
    assert store.path(DIGEST).read_bytes() == CONTENT
    assert not temp.exists()


def test_adopting_the_same_content_again_is_fine(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    assert placed(store, CONTENT) == placed(store, CONTENT) == DIGEST
    assert [entry.name for entry in tmp_path.iterdir()] == [DIGEST]


def test_file_is_durable_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        events.append("sync folder" if path == str(tmp_path) else "sync file")
        fsync(fd)

    def noted_rename(path: Path, target: Path) -> Path:
        events.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    store = BlobStore(tmp_path)
    placed(store, b"adopted")
    assert events == ["sync file", "rename", "sync folder"]
    events.clear()
    incoming = begin(store)
    for chunk in CHUNKS:
        incoming.write(chunk)
    incoming.finish()
    assert events == ["sync file", "rename", "sync folder"]


def test_damage_on_disk_is_detected(tmp_path: Path) -> None:
    digest = placed(BlobStore(tmp_path), CONTENT)
    with (tmp_path / digest).open("r+b") as file:
        file.seek(2 * CHUNK_BYTES)
        file.write(b"\xff\x00")
    fresh = BlobStore(tmp_path)
    assert not fresh.verify(digest)
    with pytest.raises(StoreError, match="damaged"):
        fresh.chunk_digests(digest)


def test_chunk_digests_are_read_from_the_file_once(tmp_path: Path) -> None:
    digest = placed(BlobStore(tmp_path), CONTENT)
    fresh = BlobStore(tmp_path)
    assert fresh.verify(digest)
    assert fresh.chunk_digests(digest) == HASHES
    fresh.path(digest).unlink()
    assert fresh.chunk_digests(digest) == HASHES, "a second answer does not read the file"
    assert not fresh.verify(digest)


def test_the_number_of_chunk_lists_in_memory_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "CHUNK_LISTS_KEPT", 2)
    store = BlobStore(tmp_path)
    first, *rest = [placed(store, bytes([i])) for i in range(3)]
    for digest in (first, *rest):
        store.path(digest).unlink()
    for digest in rest:
        assert store.chunk_digests(digest)
    with pytest.raises(StoreError):
        store.chunk_digests(first)


@pytest.mark.parametrize(
    "text", ["", "../" + "a" * 61, "/etc/passwd", "A" * 64, "a" * 63, "a" * 64 + "\n", "a" * 65]
)
def test_only_a_digest_becomes_a_path(tmp_path: Path, text: str) -> None:
    store = BlobStore(tmp_path)
    for use in (store.path, store.has, store.verify, store.chunk_digests):
        with pytest.raises(ValueError, match="not a digest"):
            use(Digest(text))
    with pytest.raises(ValueError, match="not a digest"):
        store.partial_chunks(Digest(text), 1)


def test_disk_errors_name_the_file(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    with pytest.raises(StoreError, match="nothing: No such file"):
        store.adopt(tmp_path / "nothing")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="file"):
        BlobStore(tmp_path / "file")


def test_retain_deletes_the_rest(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, ".safetensors")
    kept, dropped = placed(store, b"kept"), placed(store, b"dropped")
    stale = Digest("ab" * 32)
    (tmp_path / f"{stale}.part").write_bytes(b"half")
    wanted = Digest("cd" * 32)
    (tmp_path / f"{wanted}.part").write_bytes(b"half")
    (tmp_path / "README").write_bytes(b"not ours")
    store.retain({kept, wanted})
    assert not store.has(dropped)
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {f"{kept}.safetensors", f"{wanted}.part", "README"}


def test_clear_scratch_deletes_temporary_files_of_a_crash(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    digest = placed(store, CONTENT)
    store.scratch_path().write_bytes(b"half a model")
    store.clear_scratch()
    assert [entry.name for entry in tmp_path.iterdir()] == [digest]


# -- received files -------------------------------------------------------------------------------


def test_a_received_file_gets_its_name_only_at_the_end(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    incoming = begin(store)
    for index, chunk in enumerate(CHUNKS):
        assert (incoming.next_chunk, incoming.complete) == (index, False)
        assert not store.has(DIGEST)
        incoming.write(chunk)
    assert incoming.complete
    assert not store.has(DIGEST)
    incoming.finish()
    assert store.verify(DIGEST)
    assert store.chunk_digests(DIGEST) == HASHES
    assert [entry.name for entry in tmp_path.iterdir()] == [DIGEST]


def test_an_interrupted_transfer_resumes_where_it_ended(tmp_path: Path) -> None:
    incoming = begin(BlobStore(tmp_path))
    incoming.write(CHUNKS[0])
    incoming.write(CHUNKS[1])
    incoming.close()
    store = BlobStore(tmp_path)
    assert store.partial_chunks(DIGEST, len(CONTENT)) == 2
    resumed = begin(store)
    assert resumed.next_chunk == 2
    resumed.write(CHUNKS[2])
    assert store.partial_chunks(DIGEST, len(CONTENT)) == 3
    resumed.finish()
    assert store.verify(DIGEST)
    assert store.partial_chunks(DIGEST, len(CONTENT)) == 0


@settings(max_examples=30, deadline=None)
@given(length=st.integers(0, len(CONTENT) + 10), damage=st.integers(0, len(CONTENT) - 1))
def test_a_partial_file_is_checked_again_after_a_crash(
    tmp_path_factory: pytest.TempPathFactory, length: int, damage: int
) -> None:
    store = BlobStore(tmp_path_factory.mktemp("store"))
    part = bytearray((CONTENT + bytes(10))[:length])
    if damage < length:
        part[damage] ^= 0x80
    (store.folder / f"{DIGEST}.part").write_bytes(part)
    incoming = begin(store)
    sound = min(length, damage, len(CONTENT))
    assert incoming.next_chunk == sound // CHUNK_BYTES
    for chunk in CHUNKS[incoming.next_chunk :]:
        incoming.write(chunk)
    incoming.finish()
    assert store.path(DIGEST).read_bytes() == CONTENT


def test_a_partial_file_that_is_too_long_is_truncated(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    (tmp_path / f"{DIGEST}.part").write_bytes(CONTENT + b"tail")
    assert store.partial_chunks(DIGEST, len(CONTENT)) == len(CHUNKS)
    incoming = begin(store)
    assert incoming.complete
    incoming.finish()
    assert store.verify(DIGEST)


def test_a_bad_chunk_is_refused_and_leaves_the_good_ones(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    incoming = begin(store)
    incoming.write(CHUNKS[0])
    for bad in (CHUNKS[0], CHUNKS[1][:-1], CHUNKS[1] + b"x", b""):
        with pytest.raises(ChunkRefused) as caught:
            incoming.write(bad)
        assert caught.value.reason is Reason.CHECKSUM
    assert incoming.next_chunk == 1
    with pytest.raises(ValueError, match="chunk 1 is still missing"):
        incoming.finish()
    incoming.write(CHUNKS[1])
    incoming.write(CHUNKS[2])
    with pytest.raises(ChunkRefused) as caught:
        incoming.write(CHUNKS[2])
    assert caught.value.reason is Reason.TOO_LARGE
    incoming.finish()
    assert store.verify(DIGEST)


@pytest.mark.parametrize(
    ("raw_bytes", "hashes"),
    [
        (len(CONTENT), HASHES[:2]),
        (len(CONTENT), (*HASHES, HASHES[0])),
        (len(CONTENT), (HASHES[1], HASHES[0], HASHES[2])),
        (len(CONTENT) - 1, HASHES),
    ],
)
def test_a_chunk_list_of_another_digest_is_refused(
    tmp_path: Path, raw_bytes: int, hashes: tuple[bytes, ...]
) -> None:
    with pytest.raises(ChunkRefused) as caught:
        begin(BlobStore(tmp_path), raw_bytes=raw_bytes, chunk_digests=hashes)
    assert caught.value.reason is Reason.CHECKSUM
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_transfer_does_not_hash_everything_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlobStore(tmp_path)
    first = begin(store)
    first.write(CHUNKS[0])
    first.write(CHUNKS[1])
    first.close()
    hashed: list[int] = []
    actual = hashlib.sha256

    def counting(content: bytes = b"") -> Any:
        hashed.append(len(content))
        return actual(content)

    monkeypatch.setattr(hashlib, "sha256", counting)
    again = begin(store)
    assert again.next_chunk == 2
    assert CHUNK_BYTES not in hashed
    again.close()
    assert begin(BlobStore(tmp_path)).next_chunk == 2, "another process looks for itself"
    assert hashed.count(CHUNK_BYTES) == 2


def test_a_truncated_partial_file_resumes_at_its_end(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    first = begin(store)
    first.write(CHUNKS[0])
    first.write(CHUNKS[1])
    first.close()
    os.truncate(tmp_path / f"{DIGEST}.part", CHUNK_BYTES + 5)
    again = begin(store)
    assert again.next_chunk == 1
    again.close()


def test_one_content_is_received_by_one_transfer_at_a_time(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    first = begin(store)
    with pytest.raises(AlreadyDownloading):
        begin(store)
    store.retain(set())
    assert store.partial_files() == {DIGEST}, "what is arriving is not swept away"
    first.close()
    second = begin(store)
    first.close()
    with pytest.raises(AlreadyDownloading):
        begin(store)  # closing the first again has not released the second
    second.close()


def test_a_full_disk_is_detected_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlobStore(tmp_path)
    actual = os.statvfs(tmp_path)
    fields = list(actual)
    fields[4] = 0  # blocks free to us
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    with pytest.raises(DiskFull, match="no room"):
        begin(store)
    monkeypatch.undo()
    begin(store).close()  # the claim was given back


def test_a_symlink_in_place_of_a_partial_file_is_not_followed(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "store")
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (store.folder / f"{DIGEST}.part").symlink_to(victim)
    with pytest.raises(StoreError):
        begin(store)
    assert victim.read_bytes() == b"precious"
