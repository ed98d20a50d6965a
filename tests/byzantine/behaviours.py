"""Byzantine behaviours of a peer, one function each.

A behaviour may leave state in the member (an offered update, an announcement), which stays until
the next one starts.  The tests check the effects.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from lightyear_node.identity.keys import make_identity
from lightyear_node.storage.blobs import tree_digest
from lightyear_node.transport import messages
from lightyear_node.types import CHUNK_BYTES, ROUND_MAX, Announcement, Digest, PeerName, Round
from lightyear_node.v1 import exchange_pb2 as pb
from tests.byzantine.member import Member, Weights

STORED, ZSTD = 0, 1
TEBIBYTE = 1 << 40
SMALL_MESSAGE_BYTES_MAX = 64 << 10
MESSAGE_BYTES_MAX = 2 << 20
FLOOD = 60
"""Number of calls; far above every burst limit."""

Behaviour = Callable[[Member], Awaitable[None]]
BEHAVIOURS: dict[str, Behaviour] = {}


def behaviour(function: Behaviour) -> Behaviour:
    BEHAVIOURS[function.__name__.replace("_", "-")] = function
    return function


# -- Invalid frames -------------------------------------------------------------------------------


def frame_of(planes: Iterable[tuple[int, bytes]], kind: int = 0) -> bytes:
    return bytes([kind]) + b"".join(
        struct.pack("<BI", method, len(packed)) + packed for method, packed in planes
    )


def planes_of(weights: Weights) -> list[bytes]:
    """The planes of the first chunk; all tensors of the model are float32."""
    [run] = weights.grid.runs(0)
    elements = np.frombuffer(weights.content[run.begin : run.end], np.uint8)
    return [elements[byte :: run.width].tobytes() for byte in range(run.width)]


def fresh(member: Member) -> Weights:
    """New weights, so that the node has to fetch them."""
    weights = member.weights()
    return weights.with_tensors(os.urandom(4) + weights.tensors[4:])


def serve_frame(member: Member, frame: Callable[[Weights], bytes]) -> None:
    weights = fresh(member)
    listed, _, *rest = weights.pieces()
    chunk = messages.chunk_to(0, frame(weights)).SerializeToString()
    member.serve(weights, [listed, chunk, *rest])


def serve_plane(member: Member, packed: Callable[[bytes], bytes]) -> None:
    """Serve a frame that is valid, except for its first plane."""

    def frame(weights: Weights) -> bytes:
        first, *others = planes_of(weights)
        return frame_of([(ZSTD, packed(first)), *((STORED, plane) for plane in others)])

    serve_frame(member, frame)


@behaviour
async def bomb(member: Member) -> None:
    """A decompression bomb: a few kilobytes that become a gigabyte."""
    packed = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    serve_plane(member, lambda plane: packed)


@behaviour
async def window_bomb(member: Member) -> None:
    """The right size, but a window of 128 MiB."""
    header = zstandard.FRAME_HEADER + bytes([0x80, (27 - 10) << 3])
    serve_plane(member, lambda plane: header + struct.pack("<I", len(plane)) + bytes(8))


@behaviour
async def tebibyte(member: Member) -> None:
    header = zstandard.FRAME_HEADER + bytes([0xE0])
    serve_plane(member, lambda plane: header + struct.pack("<Q", TEBIBYTE) + bytes(8))


@behaviour
async def skippable_frame(member: Member) -> None:
    skipped = struct.pack("<II", 0x184D2A50, 4) + b"abcd"
    serve_plane(member, lambda plane: skipped + zstandard.compress(plane))


@behaviour
async def concatenated_frames(member: Member) -> None:
    serve_plane(member, lambda plane: zstandard.compress(plane) + zstandard.compress(plane))


@behaviour
async def garbage_tail(member: Member) -> None:
    serve_frame(member, lambda w: frame_of((STORED, plane) for plane in planes_of(w)) + b"tail")


@behaviour
async def truncated_frame(member: Member) -> None:
    serve_frame(member, lambda w: frame_of((STORED, plane) for plane in planes_of(w))[:-9])


@behaviour
async def flipped_byte(member: Member) -> None:
    def frame(weights: Weights) -> bytes:
        right = bytearray(frame_of((STORED, plane) for plane in planes_of(weights)))
        right[-1] ^= 1
        return bytes(right)

    serve_frame(member, frame)


@behaviour
async def unsolicited_delta(member: Member) -> None:
    """Differences that the node has not requested."""
    serve_frame(member, lambda w: frame_of(((STORED, plane) for plane in planes_of(w)), kind=1))


@behaviour
async def oversized_chunk(member: Member) -> None:
    serve_frame(member, lambda weights: bytes(3 << 19))


@behaviour
async def oversized_piece(member: Member) -> None:
    serve_frame(member, lambda weights: bytes(MESSAGE_BYTES_MAX + 1))


# -- Invalid streams ------------------------------------------------------------------------------


@behaviour
async def truncated_stream(member: Member) -> None:
    weights = fresh(member)
    member.serve(weights, weights.pieces()[:1])


@behaviour
async def one_chunk_too_many(member: Member) -> None:
    weights = fresh(member)
    pieces = weights.pieces()
    member.serve(weights, [*pieces, pieces[-1]])


@behaviour
async def another_list(member: Member) -> None:
    weights = fresh(member)
    listed = messages.list_to(len(weights.content), (b"\1" * 32,) * len(weights.hashes))
    member.serve(weights, [listed.SerializeToString(), *weights.pieces()[1:]])


@behaviour
async def long_list(member: Member) -> None:
    weights = fresh(member)
    listed = messages.list_to(len(weights.content), weights.hashes * 2)
    member.serve(weights, [listed.SerializeToString()])


@behaviour
async def huge_list(member: Member) -> None:
    """A chunk list that states 2^60 bytes."""
    weights = fresh(member)
    listed = messages.list_to(1 << 60, weights.hashes)
    member.serve(weights, [listed.SerializeToString()])


@behaviour
async def fresh_digests(member: Member) -> None:
    """A new update at every heartbeat, whose last chunk is never sent."""

    def reply() -> bytes:
        weights = fresh(member)
        member.serve(weights, weights.pieces()[:-1])
        member.reply = reply
        return member.announcement()

    member.reply = reply


def serve_list(member: Member, raw_bytes: int, hashes: tuple[bytes, ...]) -> None:
    """Announce the right size with the digest of this chunk list; send only the list."""
    manifest = member.manifest(fresh(member))
    update = replace(manifest.update, digest=tree_digest(raw_bytes, hashes))
    member.announce(replace(manifest, update=update))
    member.offers[update.digest] = [messages.list_to(raw_bytes, hashes).SerializeToString()]


@behaviour
async def empty_list(member: Member) -> None:
    """An empty chunk list, with its digest."""
    serve_list(member, 0, ())


@behaviour
async def short_list(member: Member) -> None:
    """A valid list and its digest, of a file that is shorter than announced."""
    content = fresh(member).content[:-4]
    serve_list(member, len(content), Weights(fresh(member).grid, content).hashes)


@behaviour
async def longer_list(member: Member) -> None:
    """A valid list and its digest, of a file that is longer than announced."""
    content = fresh(member).content + bytes(CHUNK_BYTES)
    serve_list(member, len(content), Weights(fresh(member).grid, content).hashes)


@behaviour
async def no_piece(member: Member) -> None:
    member.serve(fresh(member), [pb.Piece().SerializeToString()])


@behaviour
async def malformed_piece(member: Member) -> None:
    member.serve(fresh(member), [b"\xff" * 64])


@behaviour
async def other_header(member: Member) -> None:
    """A file of another model, of the same length."""
    weights = fresh(member)
    header = weights.grid.header.replace(b'.weight"', b'.height"')
    assert header != weights.grid.header
    other = Weights(weights.grid, header + weights.tensors)
    member.serve(other)


# -- Code instead of weights ----------------------------------------------------------------------


class CreatesMarker:
    """Creates a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


def pickled(marker: Path) -> bytes:
    return pickle.dumps(CreatesMarker(marker))


def marker_of(node: Path) -> Path:
    """The folder that the pickled code would create."""
    return node / "code-was-run"


def code_as_weights(member: Member) -> tuple[Weights, bytes]:
    """An update whose file is a pickle, padded to the expected length."""
    weights = member.weights()
    code = pickled(marker_of(member.node_home))
    return Weights(weights.grid, code.ljust(len(weights.content), b"\0")), code


@behaviour
async def pickle_as_frame(member: Member) -> None:
    weights, code = code_as_weights(member)
    listed = weights.pieces()[0]
    member.serve(weights, [listed, messages.chunk_to(0, code).SerializeToString()])


@behaviour
async def pickle_as_file(member: Member) -> None:
    member.serve(code_as_weights(member)[0])


@behaviour
async def pickle_as_tensors(member: Member) -> None:
    """In the tensors' bytes: a valid update until it is judged."""
    weights = member.weights()
    code = pickled(marker_of(member.node_home))
    member.serve(weights.with_tensors(code + weights.tensors[len(code) :]))


# -- Harmful weights ------------------------------------------------------------------------------


@behaviour
async def nan_weights(member: Member) -> None:
    weights = member.weights()
    count = len(weights.tensors) // 4
    member.serve(weights.with_tensors(np.full(count, np.nan, np.float32).tobytes()))


@behaviour
async def huge_scale(member: Member) -> None:
    weights = member.weights()
    values = np.frombuffer(weights.tensors, np.float32) * np.float32(1e6)
    member.serve(weights.with_tensors(values.tobytes()))


@behaviour
async def echo(member: Member) -> None:
    """Announce the node's own update as ours."""
    assert member.node_state is not None
    assert member.node_state.latest is not None
    theirs = member.node_state.latest.manifest
    update = replace(theirs.update, peer=member.identity.name, round=Round(theirs.update.round + 1))
    member.latest = member.identity.sign_manifest(replace(theirs, update=update))


# -- Invalid announcements ------------------------------------------------------------------------


@behaviour
async def other_schema(member: Member) -> None:
    member.promise(fresh(member), schema=Digest("0" * 64))


@behaviour
async def huge_update(member: Member) -> None:
    member.promise(fresh(member), raw_bytes=1 << 61)


@behaviour
async def short_update(member: Member) -> None:
    weights = fresh(member)
    member.promise(weights, raw_bytes=len(weights.content) - 4)


@behaviour
async def far_future(member: Member) -> None:
    """An update for the last possible round; valid except for its values."""
    await nan_weights(member)
    assert member.latest is not None
    manifest = member.latest.manifest
    last = replace(manifest.update, round=Round(ROUND_MAX - 1))
    member.latest = member.identity.sign_manifest(replace(manifest, update=last))
    member.generation += 1  # so that later announcements are newer


@behaviour
async def beyond_all_rounds(member: Member) -> None:
    manifest = member.manifest(fresh(member))
    beyond = replace(manifest.update, round=Round(ROUND_MAX + 1))
    signed = member.identity.sign_manifest(replace(manifest, update=beyond))
    member.reply = lambda: raw_announcement(member, latest=signed)


@behaviour
async def replayed_update(member: Member) -> None:
    """Announce the last but one update again, with its valid signature."""
    member.latest = member.promised[-2]


@behaviour
async def other_federation(member: Member) -> None:
    member.promise(fresh(member), federation="another")


@behaviour
async def forged_signature(member: Member) -> None:
    signed = member.promise(fresh(member))
    member.latest = replace(signed, signature=bytes(64))


@behaviour
async def anothers_key(member: Member) -> None:
    manifest = member.manifest(fresh(member))
    stranger = make_identity(member.identity.name, member.identity.certificate.expires)
    member.latest = stranger.sign_manifest(manifest)


@behaviour
async def anothers_name(member: Member) -> None:
    manifest = member.manifest(fresh(member))
    other = replace(manifest.update, peer=PeerName("site-c"))
    member.latest = member.identity.sign_manifest(replace(manifest, update=other))


@behaviour
async def malformed_reply(member: Member) -> None:
    member.reply = lambda: b"\xff" * 64


@behaviour
async def large_reply(member: Member) -> None:
    member.reply = lambda: raw_announcement(member, phase="x" * (SMALL_MESSAGE_BYTES_MAX + 1))


@behaviour
async def oversized_reply(member: Member) -> None:
    member.reply = lambda: raw_announcement(member, phase="x" * (MESSAGE_BYTES_MAX + 1))


def raw_announcement(member: Member, phase: str = "collecting", **changed: Any) -> bytes:
    """A serialized announcement with arbitrary fields."""
    lamport, latest = changed.get("lamport", member.stamp), changed.get("latest")
    message = messages.announcement_to(Announcement(lamport, Round(0), phase, latest))
    return bytes(message.SerializeToString())
