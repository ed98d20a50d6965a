"""Converts protobuf messages to records and back, and checks every field of a peer.

Owns the type and size of each field on the wire.  Must not know what a field means: signatures and
rounds are checked by `protocol`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lightyear_node.config.fields import NAME_PATTERN
from lightyear_node.storage.blobs import chunk_count
from lightyear_node.transport import limits
from lightyear_node.types import (
    ROUND_MAX,
    Announcement,
    Digest,
    Evidence,
    Generation,
    Hello,
    Manifest,
    Opinion,
    PeerName,
    Round,
    SignedHead,
    SignedManifest,
    Update,
)
from lightyear_node.v1 import exchange_pb2 as pb

Message = Any
"""A generated message; mypy does not check generated code."""

_WORD = re.compile(r"[A-Za-z0-9_.-]*")
_VERSION_MAX = 2**31 - 1
_DIGEST_BYTES = 32
_SIGNATURE_BYTES = 64
_CLAUSE_BYTES = 8


class Malformed(ValueError):
    """A message that violates the protocol; no honest site sends one."""


def hello_to(hello: Hello) -> Message:
    return pb.Greeting(
        yours=_signed_to(hello.yours) if hello.yours else None,
        clauses=[
            pb.Clause(key=key, digest=bytes.fromhex(digest))
            for key, digest in hello.clauses.items()
        ],
        your_head=_head_to(hello.your_head) if hello.your_head else None,
        version_min=hello.version_min,
        version_max=hello.version_max,
        federation=hello.federation,
        agreement=bytes.fromhex(hello.agreement),
        schema=bytes.fromhex(hello.schema),
        initial_model=bytes.fromhex(hello.initial_model),
        round=hello.round,
        boot_id=hello.boot_id,
        wall_time_ns=hello.wall_time_ns,
        lamport=hello.lamport,
        probe=hello.probe,
    )


def hello_from(message: Message) -> Hello:
    return Hello(
        version_min=_number(message.version_min, "version_min", _VERSION_MAX),
        version_max=_number(message.version_max, "version_max", _VERSION_MAX),
        federation=_line(message.federation, "federation", limits.FEDERATION_CHARS_MAX),
        agreement=_digest(message.agreement, "agreement"),
        schema=_digest(message.schema, "schema"),
        initial_model=_digest(message.initial_model, "initial_model"),
        round=Round(_number(message.round, "round")),
        boot_id=_word(message.boot_id, "boot_id", limits.BOOT_ID_CHARS_MAX),
        wall_time_ns=int(message.wall_time_ns),
        lamport=_number(message.lamport, "lamport"),
        probe=bool(message.probe),
        yours=_signed_from(message.yours) if message.HasField("yours") else None,
        clauses=_clauses(message.clauses),
        your_head=_head_from(message.your_head) if message.HasField("your_head") else None,
    )


def announcement_to(announcement: Announcement) -> Message:
    latest, head, opinion = announcement.latest, announcement.head, announcement.opinion
    return pb.Announcement(
        lamport=announcement.lamport,
        round=announcement.round,
        phase=announcement.phase,
        latest=_signed_to(latest) if latest else None,
        seen=[_signed_to(signed) for signed in announcement.seen],
        evidence=[
            pb.Evidence(first=_signed_to(proof.first), second=_signed_to(proof.second))
            for proof in announcement.evidence
        ],
        head=_head_to(head) if head else None,
        progress=announcement.progress,
        opinion=_opinion_to(opinion) if opinion else None,
        boot_id=announcement.boot_id,
    )


def announcement_from(message: Message) -> Announcement:
    _at_most(len(message.seen), limits.SEEN_MAX, "updates of others")
    _at_most(len(message.evidence), limits.EVIDENCE_MAX, "pieces of evidence")
    return Announcement(
        lamport=_number(message.lamport, "lamport"),
        round=Round(_number(message.round, "round")),
        phase=_word(message.phase, "phase", limits.PHASE_CHARS_MAX),
        latest=_signed_from(message.latest) if message.HasField("latest") else None,
        seen=tuple(map(_signed_from, message.seen)),
        evidence=tuple(
            Evidence(_signed_from(proof.first), _signed_from(proof.second))
            for proof in message.evidence
        ),
        head=_head_from(message.head) if message.HasField("head") else None,
        progress=_number(message.progress, "progress"),
        opinion=_opinion_from(message.opinion) if message.HasField("opinion") else None,
        boot_id=_word(message.boot_id, "boot_id", limits.BOOT_ID_CHARS_MAX),
    )


def fetch_to(digest: Digest, first_chunk: int, delta: bool) -> Message:
    return pb.FetchRequest(digest=bytes.fromhex(digest), first_chunk=first_chunk, delta=delta)


def fetch_from(message: Message) -> tuple[Digest, int, bool]:
    first_chunk = _number(message.first_chunk, "first_chunk", limits.CHUNKS_MAX)
    return _digest(message.digest, "digest"), first_chunk, bool(message.delta)


def list_to(raw_bytes: int, chunk_digests: tuple[bytes, ...]) -> Message:
    return pb.Piece(list=pb.ChunkList(raw_bytes=raw_bytes, sha256=b"".join(chunk_digests)))


def list_from(piece: Message) -> tuple[int, tuple[bytes, ...]]:
    """Size and chunk hashes, from the first piece of a fetch."""
    if piece.WhichOneof("piece") != "list":
        raise Malformed("the first piece is not the chunk list")
    raw_bytes = _number(piece.list.raw_bytes, "raw_bytes", limits.RAW_BYTES_MAX)
    joined = bytes(piece.list.sha256)
    if len(joined) != chunk_count(raw_bytes) * _DIGEST_BYTES:
        raise Malformed(f"a chunk list of {len(joined)} bytes for {raw_bytes} bytes of weights")
    steps = range(0, len(joined), _DIGEST_BYTES)
    return raw_bytes, tuple(joined[i : i + _DIGEST_BYTES] for i in steps)


def chunk_to(index: int, frame: bytes) -> Message:
    return pb.Piece(chunk=pb.Chunk(index=index, frame=frame))


def chunk_from(piece: Message, expected_index: int) -> bytes:
    """The frame of a further piece; they come in order."""
    if piece.WhichOneof("piece") != "chunk":
        raise Malformed("a piece that is not a chunk")
    if piece.chunk.index != expected_index:
        raise Malformed(f"chunk {piece.chunk.index} instead of {expected_index}")
    return bytes(piece.chunk.frame)


def _signed_to(signed: SignedManifest) -> Message:
    manifest = signed.manifest
    return pb.SignedManifest(
        manifest=pb.Manifest(
            federation=manifest.federation,
            peer=manifest.update.peer,
            generation=manifest.update.generation,
            round=manifest.update.round,
            lamport=manifest.lamport,
            digest=bytes.fromhex(manifest.update.digest),
            schema=bytes.fromhex(manifest.schema),
            raw_bytes=manifest.raw_bytes,
            samples=manifest.samples,
            base=bytes.fromhex(manifest.base or ""),
            dtype=manifest.dtype,
        ),
        signature=signed.signature,
    )


def _signed_from(message: Message) -> SignedManifest:
    signature = _signature(message.signature)
    manifest = message.manifest
    if not re.fullmatch(NAME_PATTERN, manifest.peer):
        raise Malformed("a manifest whose peer has no valid name")
    update = Update(
        peer=PeerName(manifest.peer),
        generation=Generation(_number(manifest.generation, "generation")),
        round=Round(_number(manifest.round, "round")),
        digest=_digest(manifest.digest, "digest"),
    )
    return SignedManifest(
        Manifest(
            federation=_line(manifest.federation, "federation", limits.FEDERATION_CHARS_MAX),
            update=update,
            lamport=_number(manifest.lamport, "lamport"),
            schema=_digest(manifest.schema, "schema"),
            raw_bytes=_number(manifest.raw_bytes, "raw_bytes"),
            samples=_number(manifest.samples, "samples"),
            base=_digest(manifest.base, "base") if manifest.base else None,
            dtype=_word(manifest.dtype, "dtype", limits.DTYPE_CHARS_MAX),
        ),
        signature,
    )


def _head_to(head: SignedHead) -> Message:
    return pb.SignedHead(seq=head.seq, hash=bytes.fromhex(head.hash), signature=head.signature)


def _head_from(message: Message) -> SignedHead:
    return SignedHead(
        seq=_number(message.seq, "seq"),
        hash=_digest(message.hash, "hash"),
        signature=_signature(message.signature),
    )


def _opinion_to(opinion: Opinion) -> Message:
    return pb.Opinion(
        round=opinion.round,
        digest=bytes.fromhex(opinion.digest),
        accepted=opinion.accepted,
        reason=opinion.reason,
    )


def _opinion_from(message: Message) -> Opinion:
    return Opinion(
        round=Round(_number(message.round, "round")),
        digest=_digest(message.digest, "digest"),
        accepted=bool(message.accepted),
        reason=_word(message.reason, "reason", limits.REASON_CHARS_MAX),
    )


def _clauses(clauses: Sequence[Message]) -> dict[str, str]:
    _at_most(len(clauses), limits.CLAUSES_MAX, "clauses")
    found: dict[str, str] = {}
    for clause in clauses:
        if len(clause.digest) != _CLAUSE_BYTES:
            raise Malformed(f"a clause with a digest of {len(clause.digest)} bytes")
        found[_word(clause.key, "key", limits.CLAUSE_CHARS_MAX)] = bytes(clause.digest).hex()
    return found


def _signature(value: bytes) -> bytes:
    if len(value) != _SIGNATURE_BYTES:
        raise Malformed(f"a signature of {len(value)} bytes")
    return bytes(value)


def _at_most(number: int, largest: int, what: str) -> None:
    if number > largest:
        raise Malformed(f"{number} {what}, at most {largest}")


def _number(value: int, field: str, largest: int = ROUND_MAX) -> int:
    if value > largest:
        raise Malformed(f"{field} is {value}, at most {largest}")
    return int(value)


def _digest(value: bytes, field: str) -> Digest:
    if len(value) != _DIGEST_BYTES:
        raise Malformed(f"{field} has {len(value)} bytes, not {_DIGEST_BYTES}")
    return Digest(value.hex())


def _line(value: str, field: str, chars_max: int) -> str:
    if len(value) > chars_max or not value.isprintable():
        raise Malformed(f"{field} is not one printable line of at most {chars_max} characters")
    return str(value)


def _word(value: str, field: str, chars_max: int) -> str:
    if len(value) > chars_max or not _WORD.fullmatch(value):
        raise Malformed(f"{field} is not one word of at most {chars_max} characters")
    return str(value)
