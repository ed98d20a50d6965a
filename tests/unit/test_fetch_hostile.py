"""Pulling an update from a member that sends something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import zstandard

from lightyear_node.errors import PeerMisbehaved, PeerUnreachable
from lightyear_node.records import Reason
from lightyear_node.store import Store
from lightyear_node.transport.codec import Grid, encode_chunk
from lightyear_node.v1 import exchange_pb2 as pb

from .pieces import FRAMES, LAST, chunk, fetched_from, listed, sending
from .sites import CHUNKS, CONTENT, DIGEST, ELEMENTS, GRID, HASHES, frame_of, header_of

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
