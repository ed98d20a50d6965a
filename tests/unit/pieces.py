"""A peer that sends whatever pieces it is told to, and what a fetch from it ends with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lightyear_node.errors import PeerError
from lightyear_node.store import Store
from lightyear_node.transport.codec import Grid, encode_chunk
from lightyear_node.v1 import exchange_pb2 as pb

from .sites import CHUNKS, CONTENT, GRID, HASHES, MANIFEST, calling, hostile

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
