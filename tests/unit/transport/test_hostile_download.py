"""Fetching an update from a peer that sends something else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import zstandard

from lightyear_node.errors import PeerMisbehaved, PeerUnreachable
from lightyear_node.storage.blobs import BlobStore, tree_digest
from lightyear_node.transport.codec import ChunkGrid, encode_chunk
from lightyear_node.types import CHUNK_BYTES, Reason
from lightyear_node.v1 import exchange_pb2 as pb
from tests.support.fake_peer import FRAMES, LAST, chunk, fetched_from, listed, sending
from tests.support.tls_sites import (
    CHUNKS,
    CONTENT,
    DIGEST,
    ELEMENTS,
    GRID,
    HASHES,
    MANIFEST,
    frame_of,
    header_of,
)

pytestmark = pytest.mark.usefixtures("short_pauses")

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
        pytest.param([listed(), chunk(0, FRAMES[0][:-9])], Reason.MALFORMED, id="truncated frame"),
        pytest.param([listed(), chunk(0, b"")], Reason.MALFORMED, id="empty frame"),
        pytest.param([listed(), chunk(0, bytes(3 << 19))], Reason.TOO_LARGE, id="large frame"),
        # gRPC refuses it before it is parsed.
        pytest.param([listed(sha256=bytes(3 << 20))], Reason.TOO_LARGE, id="large message"),
        pytest.param(
            [listed(), *map(chunk, range(LAST + 1)), chunk(0)], Reason.TOO_LARGE, id="one too many"
        ),
    ],
)
def test_every_violation_is_refused_with_its_reason(
    tmp_path: Path, pieces: list[Any], reason: Reason
) -> None:
    store = BlobStore(tmp_path)
    error = fetched_from(sending(*pieces), store)
    assert isinstance(error, PeerMisbehaved)
    assert error.reason is reason
    assert str(error).startswith("site-a: ")
    assert not store.has(DIGEST)
    part = tmp_path / f"{DIGEST}.part"
    if part.exists():
        assert CONTENT.startswith(part.read_bytes()), "only verified bytes are kept"


@pytest.mark.parametrize("chunks", [0, 1, LAST])
def test_a_chunk_list_of_another_size_is_refused(tmp_path: Path, chunks: int) -> None:
    """Its digest is right; only its size is not that in the manifest."""
    raw_bytes, hashes = chunks * CHUNK_BYTES, HASHES[:chunks]
    digest = tree_digest(raw_bytes, hashes)
    manifest = replace(MANIFEST, update=replace(MANIFEST.update, digest=digest))
    store = BlobStore(tmp_path)
    pieces = [listed(raw_bytes, b"".join(hashes)), *map(chunk, range(chunks))]
    error = fetched_from(sending(*pieces), store, manifest=manifest)
    assert isinstance(error, PeerMisbehaved)
    assert error.reason is Reason.CHECKSUM
    assert list(tmp_path.iterdir()) == []


def test_a_stored_file_of_another_size_than_announced_is_refused(tmp_path: Path) -> None:
    """The peer's manifest may name the digest of any file in our store."""
    store = BlobStore(tmp_path)
    scratch = store.scratch_path()
    scratch.write_bytes(b"short")
    digest = store.adopt(scratch).digest
    manifest = replace(MANIFEST, update=replace(MANIFEST.update, digest=digest))
    error = fetched_from(sending(), store, manifest=manifest)
    assert isinstance(error, PeerMisbehaved)
    assert error.reason is Reason.CHECKSUM


def test_an_invalid_chunk_takes_precedence_over_the_disconnect_after_it(tmp_path: Path) -> None:
    async def invalid_then_disconnected(request: Any, context: Any) -> None:
        await sending(listed(), chunk(0, OTHER))(request, context)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    error = fetched_from(invalid_then_disconnected, BlobStore(tmp_path))
    assert isinstance(error, PeerMisbehaved)
    assert error.reason is Reason.CHECKSUM


def test_weights_with_another_header_are_refused(tmp_path: Path) -> None:
    """The header is not sent: with ours in its place, the chunk has another hash."""
    store = BlobStore(tmp_path)
    pieces = [listed(), *map(chunk, range(LAST + 1))]
    error = fetched_from(sending(*pieces), store, grid=ChunkGrid(header_of("v", ELEMENTS)))
    assert isinstance(error, PeerMisbehaved)
    assert error.reason is Reason.CHECKSUM
    assert not store.has(DIGEST)
    assert store.partial_chunks(DIGEST, len(CONTENT)) == 0


def test_an_empty_stream_is_reported_as_truncated(tmp_path: Path) -> None:
    error = fetched_from(sending(), BlobStore(tmp_path))
    assert isinstance(error, PeerUnreachable)
    assert error.reason is Reason.TRUNCATED
