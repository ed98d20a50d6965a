"""A peer that sends arbitrary pieces, and the result of a fetch from it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lightyear_node.errors import PeerError
from lightyear_node.storage.blobs import BlobStore
from lightyear_node.transport.codec import ChunkGrid, encode_chunk
from lightyear_node.types import Manifest
from lightyear_node.v1 import exchange_pb2 as pb
from tests.support.tls_sites import CHUNKS, CONTENT, GRID, HASHES, MANIFEST, calling, hostile

Fetch = Callable[[Any, Any], Awaitable[None]]
FRAMES = [encode_chunk(GRID, index, chunk) for index, chunk in enumerate(CHUNKS)]
LAST = len(CHUNKS) - 1


def listed(raw_bytes: int = len(CONTENT), sha256: bytes = b"".join(HASHES)) -> Any:
    return pb.Piece(list=pb.ChunkList(raw_bytes=raw_bytes, sha256=sha256))


def chunk(index: int, frame: bytes | None = None) -> Any:
    return pb.Piece(chunk=pb.Chunk(index=index, frame=FRAMES[index] if frame is None else frame))


def sending(*pieces: Any) -> Fetch:
    """A handler that sends these pieces, whatever was requested, and ends the stream."""

    async def fetch(request: Any, context: Any) -> None:
        for piece in pieces:
            await context.write(piece)

    return fetch


def fetched_from(
    fetch: Fetch, store: BlobStore, grid: ChunkGrid = GRID, manifest: Manifest = MANIFEST
) -> PeerError:
    """The error that a fetch from a hostile peer raises."""

    async def scenario() -> PeerError:
        async with hostile(fetch) as address, calling(address) as client:
            with pytest.raises(PeerError) as caught:
                await client.fetch(manifest, store, grid)
        return caught.value

    return asyncio.run(scenario())
