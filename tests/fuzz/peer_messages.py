"""Fuzz target: messages of a peer, from their bytes to the checks of their content.

The first byte of an input selects the message type and how to read the rest: as the message, or as
changes to the fields of a valid one, since random bytes are hardly ever a valid message.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from lightyear_node.identity.keys import make_identity
from lightyear_node.protocol.manifests import refusal
from lightyear_node.transport import limits, messages
from lightyear_node.types import (
    Announcement,
    Digest,
    Evidence,
    Generation,
    Hello,
    Manifest,
    Opinion,
    PeerName,
    Reason,
    Round,
    SignedManifest,
    Update,
)
from lightyear_node.v1 import exchange_pb2 as pb

SITE = make_identity("site-b", datetime(2026, 1, 1, tzinfo=UTC))
MANIFEST = Manifest(
    federation="chest-xray",
    update=Update(PeerName("site-b"), Generation(0), Round(7), Digest("ab" * 32)),
    lamport=99,
    schema=Digest("cd" * 32),
    raw_bytes=10_000,
    samples=500,
    base=Digest("ef" * 32),
)
HELLO = Hello(
    version_min=1,
    version_max=1,
    federation="chest-xray",
    agreement=Digest("01" * 32),
    schema=Digest("cd" * 32),
    initial_model=Digest("02" * 32),
    round=Round(7),
    boot_id="3f2b-11",
    wall_time_ns=-1,
    lamport=12,
    yours=SITE.sign_manifest(MANIFEST),
    clauses={"rule.tau": "0123456789abcdef"},
    your_head=SITE.sign_head("chest-xray", 7, Digest("03" * 32)),
)
SIGNED = SITE.sign_manifest(MANIFEST)
HEAD = SITE.sign_head("chest-xray", 7, Digest("03" * 32))
ANNOUNCED = messages.announcement_to(
    Announcement(
        99,
        Round(7),
        "collecting",
        SIGNED,
        seen=(SIGNED,),
        evidence=(Evidence(SIGNED, SIGNED),),
        head=HEAD,
        progress=3,
        opinion=Opinion(Round(6), Digest("ab" * 32), False, "too_far"),
        boot_id="3f2b-11",
    )
)
VALID = (
    messages.hello_to(HELLO),
    ANNOUNCED,
    messages.fetch_to(Digest("ab" * 32), 3, True),
    pb.Answer(refusal=pb.Refusal(code=5, details="not_offered")),
)
TEXT_BYTES_MAX = 200


def seeds() -> Iterator[bytes]:
    for kind, message in enumerate(VALID):
        yield bytes([kind]) + message.SerializeToString()
        yield bytes([kind | 0x80]) + b"\x02\x02no"
    yield b"\x81\x03\x03\x00\x08" + b"\xff" * 8
    yield b"\x81\x03\x00\x01\x08site-a\0\0"


def check(wire: bytes) -> None:
    if not wire:
        return
    kind = (wire[0] & 0x7F) % len(VALID)
    try:
        if wire[0] & 0x80:
            message = _changed(VALID[kind], wire[1:])
        else:
            message = type(VALID[kind]).FromString(wire[1:])
        _check_message(kind, message)
    except (DecodeError, messages.Malformed):
        return


def _check_message(kind: int, message: Any) -> None:
    match kind:
        case 0:
            hello = messages.hello_from(message)
            assert messages.hello_from(messages.hello_to(hello)) == hello
            assert hello.federation.isprintable()
        case 1:
            announcement = messages.announcement_from(message)
            again = messages.announcement_to(announcement)
            assert messages.announcement_from(again) == announcement
            assert again.ByteSize() <= limits.SMALL_MESSAGE_BYTES_MAX
            assert announcement.phase.isprintable()
            for signed in _manifests(announcement):
                _check_manifest(signed)
        case 2:
            digest, first_chunk, delta = messages.fetch_from(message)
            again = messages.fetch_to(digest, first_chunk, delta)
            assert messages.fetch_from(again) == (digest, first_chunk, delta)
        case _:
            assert message.WhichOneof("answer") in {None, "hello", "announce", "piece", "refusal"}


def _manifests(announcement: Announcement) -> Iterator[SignedManifest]:
    if announcement.latest is not None:
        yield announcement.latest
    yield from announcement.seen
    for proof in announcement.evidence:
        yield from (proof.first, proof.second)


def _check_manifest(signed: SignedManifest) -> None:
    wrong = refusal(
        signed,
        peer=PeerName("site-b"),
        federation="chest-xray",
        schema=MANIFEST.schema,
        raw_bytes=MANIFEST.raw_bytes,
        dtype=MANIFEST.dtype,
        verify_keys=[SITE.certificate.signing_key],
    )
    if wrong is None:
        assert signed.manifest == MANIFEST, "only what the site has signed is accepted"
    else:
        reason, text = wrong
        assert reason in Reason
        assert text.isprintable()


def _changed(valid: Any, changes: bytes) -> Any:
    """Apply changes: each has a field (one number per level), a length, and the new bytes."""
    message = type(valid)()
    message.CopyFrom(valid)
    while changes:
        changes = _change(message, changes)
    # Serialized and parsed, as a peer's message is.
    return type(valid).FromString(message.SerializeToString())


def _change(message: Any, changes: bytes) -> bytes:
    fields = message.DESCRIPTOR.fields
    field = fields[changes[0] % len(fields)]
    changes = changes[1:]
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        inner = getattr(message, field.name)
        if hasattr(inner, "add"):
            inner = inner[0] if len(inner) else inner.add()
        return _change(inner, changes) if changes else b""
    size = changes[0] % TEXT_BYTES_MAX if changes else 0
    content, rest = changes[1 : 1 + size], changes[1 + size :]
    value: Any = content
    if field.type == FieldDescriptor.TYPE_STRING:
        value = content.decode(errors="replace")
    elif field.type != FieldDescriptor.TYPE_BYTES:
        bits = 32 if field.type == FieldDescriptor.TYPE_UINT32 else 63
        value = int.from_bytes(content[:8], "little") % 2**bits
        value = bool(value) if field.type == FieldDescriptor.TYPE_BOOL else value
    setattr(message, field.name, value)
    return rest
