"""What a member can do wrong, one function each.

A behaviour begins, and may leave something behind (an update on offer, a promise), which stays
until the next one begins.  None of them knows what becomes of it.
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
from member import Member, Weights

from lightyear_node.identity import make_identity
from lightyear_node.records import ROUND_MAX, Digest, PeerName, Round
from lightyear_node.transport import messages
from lightyear_node.v1 import exchange_pb2 as pb

STORED, ZSTD = 0, 1
TEBIBYTE = 1 << 40
SMALL_MESSAGE_BYTES_MAX = 64 << 10
MESSAGE_BYTES_MAX = 2 << 20
FLOOD = 60
"""Far beyond every burst."""

Behaviour = Callable[[Member], Awaitable[None]]
BEHAVIOURS: dict[str, Behaviour] = {}


def behaviour(function: Behaviour) -> Behaviour:
    BEHAVIOURS[function.__name__.replace("_", "-")] = function
    return function


# -- frames that are not the chunk that was promised ----------------------------------------------


def frame_of(planes: Iterable[tuple[int, bytes]], kind: int = 0) -> bytes:
    return bytes([kind]) + b"".join(
        struct.pack("<BI", method, len(packed)) + packed for method, packed in planes
    )


def planes_of(weights: Weights) -> list[bytes]:
    """The planes of the first chunk; the model has float32 and nothing else."""
    [run] = weights.grid.runs(0)
    elements = np.frombuffer(weights.content[run.begin : run.end], np.uint8)
    return [elements[place :: run.width].tobytes() for place in range(run.width)]


def fresh(member: Member) -> Weights:
    """Weights that nobody has seen yet, so that the node has to fetch them."""
    weights = member.weights()
    return weights.with_tensors(os.urandom(4) + weights.tensors[4:])


def serve_frame(member: Member, frame: Callable[[Weights], bytes]) -> None:
    weights = fresh(member)
    listed, _, *rest = weights.pieces()
    chunk = messages.chunk_to(0, frame(weights)).SerializeToString()
    member.serve(weights, [listed, chunk, *rest])


def serve_plane(member: Member, packed: Callable[[bytes], bytes]) -> None:
    """A frame whose first plane is packed like this, and the rest as it should be."""

    def frame(weights: Weights) -> bytes:
        first, *others = planes_of(weights)
        return frame_of([(ZSTD, packed(first)), *((STORED, plane) for plane in others)])

    serve_frame(member, frame)


@behaviour
async def bomb(member: Member) -> None:
    """A few kilobytes that become a gigabyte."""
    packed = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    serve_plane(member, lambda plane: packed)


@behaviour
async def window_bomb(member: Member) -> None:
    """The right size, but 128 MiB are to be held while unpacking."""
    head = zstandard.FRAME_HEADER + bytes([0x80, (27 - 10) << 3])
    serve_plane(member, lambda plane: head + struct.pack("<I", len(plane)) + bytes(8))


@behaviour
async def tebibyte(member: Member) -> None:
    head = zstandard.FRAME_HEADER + bytes([0xE0])
    serve_plane(member, lambda plane: head + struct.pack("<Q", TEBIBYTE) + bytes(8))


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
    """Differences from an update that the node never said it has."""
    serve_frame(member, lambda w: frame_of(((STORED, plane) for plane in planes_of(w)), kind=1))


@behaviour
async def oversized_chunk(member: Member) -> None:
    serve_frame(member, lambda weights: bytes(3 << 19))


@behaviour
async def oversized_piece(member: Member) -> None:
    serve_frame(member, lambda weights: bytes(MESSAGE_BYTES_MAX + 1))


# -- streams that are not the update --------------------------------------------------------------


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
    """The list of an update of 2^60 bytes, or so it says."""
    weights = fresh(member)
    listed = messages.list_to(1 << 60, weights.hashes)
    member.serve(weights, [listed.SerializeToString()])


@behaviour
async def no_piece(member: Member) -> None:
    member.serve(fresh(member), [pb.Piece().SerializeToString()])


@behaviour
async def malformed_piece(member: Member) -> None:
    member.serve(fresh(member), [b"\xff" * 64])


@behaviour
async def other_header(member: Member) -> None:
    """A whole file of another model, of the same length."""
    weights = fresh(member)
    header = weights.grid.header.replace(b'.weight"', b'.height"')
    assert header != weights.grid.header
    other = Weights(weights.grid, header + weights.tensors)
    member.serve(other)


# -- code instead of weights ----------------------------------------------------------------------


class Marking:
    """Unpickled, it leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


def pickled(marker: Path) -> bytes:
    return pickle.dumps(Marking(marker))


def marker_of(node: Path) -> Path:
    """Where code that a node was made to run would show."""
    return node / "code-was-run"


def code_as_weights(member: Member) -> tuple[Weights, bytes]:
    """An update whose file is a pickle, filled up to the length that is due."""
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
    """In the numbers themselves: a sound update, as far as anybody can see before judging."""
    weights = member.weights()
    code = pickled(marker_of(member.node_home))
    member.serve(weights.with_tensors(code + weights.tensors[len(code) :]))


# -- weights that nobody should merge -------------------------------------------------------------


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
    """The node's own update, as if it were ours."""
    assert member.heard is not None
    assert member.heard.latest is not None
    theirs = member.heard.latest.manifest
    update = replace(theirs.update, peer=member.identity.name, round=Round(theirs.update.round + 1))
    member.latest = member.identity.sign_manifest(replace(theirs, update=update))


# -- announcements that are not sound -------------------------------------------------------------


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
    """The last round that there can be; what is on offer for it is sound, but for its numbers."""
    await nan_weights(member)
    assert member.latest is not None
    manifest = member.latest.manifest
    last = replace(manifest.update, round=Round(ROUND_MAX - 1))
    member.latest = member.identity.sign_manifest(replace(manifest, update=last))
    member.generation += 1  # or nothing that we announce later would be newer


@behaviour
async def beyond_all_rounds(member: Member) -> None:
    manifest = member.manifest(fresh(member))
    beyond = replace(manifest.update, round=Round(ROUND_MAX + 1))
    signed = member.identity.sign_manifest(replace(manifest, update=beyond))
    member.reply = lambda: said(member, latest=signed)


@behaviour
async def stamp_beyond_reach(member: Member) -> None:
    member.reply = lambda: said(member, lamport=1 << 61)


@behaviour
async def replayed_update(member: Member) -> None:
    """The update before the last one again, with its own sound signature."""
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
    member.reply = lambda: said(member, phase="x" * (SMALL_MESSAGE_BYTES_MAX + 1))


@behaviour
async def oversized_reply(member: Member) -> None:
    member.reply = lambda: said(member, phase="x" * (MESSAGE_BYTES_MAX + 1))


def said(member: Member, phase: str = "collecting", **changed: Any) -> bytes:
    """An announcement with anything in it."""
    message = pb.Announcement(lamport=changed.get("lamport", member.stamp), phase=phase)
    if "latest" in changed:
        message.latest.CopyFrom(messages._signed_to(changed["latest"]))
    return bytes(message.SerializeToString())
