"""Records survive the conversion to protobuf and back; malformed messages are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from lightyear_node.transport import limits, messages
from lightyear_node.transport.messages import Malformed
from lightyear_node.types import (
    ROUND_MAX,
    Announcement,
    Evidence,
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
from tests.support.tls_sites import HASHES, HELLO, MANIFEST, QUIET

NUMBER = st.integers(0, ROUND_MAX)
DIGEST = st.binary(min_size=32, max_size=32).map(bytes.hex)
LINE = st.text(max_size=limits.FEDERATION_CHARS_MAX).filter(str.isprintable)
NAME = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)
MANIFESTS = st.builds(
    Manifest,
    federation=LINE,
    update=st.builds(Update, peer=NAME, generation=NUMBER, round=NUMBER, digest=DIGEST),
    lamport=NUMBER,
    schema=DIGEST,
    raw_bytes=NUMBER,
    samples=NUMBER,
)
SIGNATURE = st.binary(min_size=64, max_size=64)
SIGNED = st.builds(SignedManifest, MANIFESTS, SIGNATURE)
HEADS = st.builds(SignedHead, seq=NUMBER, hash=DIGEST, signature=SIGNATURE)
WORD = st.from_regex(r"[a-z_.]{0,32}", fullmatch=True)
ANNOUNCEMENTS = st.builds(
    Announcement,
    lamport=NUMBER,
    round=NUMBER,
    phase=st.sampled_from(["observe", "train", "collect", "judge"]),
    latest=st.none() | SIGNED,
    seen=st.lists(SIGNED, max_size=3).map(tuple),
    evidence=st.lists(st.builds(Evidence, SIGNED, SIGNED), max_size=2).map(tuple),
    head=st.none() | HEADS,
    progress=NUMBER,
    opinion=st.none()
    | st.builds(Opinion, round=NUMBER, digest=DIGEST, accepted=st.booleans(), reason=WORD),
    boot_id=st.uuids().map(str),
)
HELLOS = st.builds(
    Hello,
    version_min=st.integers(0, 2**31 - 1),
    version_max=st.integers(0, 2**31 - 1),
    federation=LINE,
    agreement=DIGEST,
    schema=DIGEST,
    initial_model=DIGEST,
    round=NUMBER,
    boot_id=st.uuids().map(str),
    wall_time_ns=st.integers(-(2**63), 2**63 - 1),
    lamport=NUMBER,
    yours=st.none() | SIGNED,
    clauses=st.dictionaries(WORD, st.binary(min_size=8, max_size=8).map(bytes.hex), max_size=3),
    your_head=st.none() | HEADS,
)


@given(HELLOS)
def test_greetings_are_converted_without_loss(hello: Hello) -> None:
    wire = messages.hello_to(hello).SerializeToString()
    assert messages.hello_from(pb.Greeting.FromString(wire)) == hello


@given(ANNOUNCEMENTS)
def test_announcements_are_converted_without_loss(announcement: Announcement) -> None:
    wire = messages.announcement_to(announcement).SerializeToString()
    assert len(wire) <= limits.SMALL_MESSAGE_BYTES_MAX
    assert messages.announcement_from(pb.Announcement.FromString(wire)) == announcement


@given(st.binary(max_size=400))
def test_random_bytes_are_a_valid_record_or_malformed(wire: bytes) -> None:
    try:
        messages.announcement_from(pb.Announcement.FromString(wire))
    except (DecodeError, Malformed):
        return


def _greeting(**changed: Any) -> Any:
    message = messages.hello_to(HELLO)
    for field, value in changed.items():
        setattr(message, field, value)
    return message


@pytest.mark.parametrize(
    "changed",
    [
        {"version_max": 2**31},
        {"federation": "x" * 129},
        {"federation": "two\nlines"},
        {"agreement": b""},
        {"schema": bytes(33)},
        {"initial_model": bytes(31)},
        {"round": ROUND_MAX + 1},
        {"lamport": 2**64 - 1},
        {"boot_id": "x" * 65},
        {"boot_id": "<script>"},
    ],
)
def test_malformed_greetings_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(Malformed, match=next(iter(changed))):
        messages.hello_from(_greeting(**changed))


@pytest.mark.parametrize(
    "changed",
    [
        {"peer": ""},
        {"peer": "../site-a"},
        {"peer": "Site-A"},
        {"federation": "\x1b[31m"},
        {"generation": ROUND_MAX + 1},
        {"round": ROUND_MAX + 1},
        {"lamport": ROUND_MAX + 1},
        {"digest": b"short"},
        {"schema": b""},
        {"raw_bytes": ROUND_MAX + 1},
        {"samples": 2**64 - 1},
    ],
)
def test_malformed_manifests_are_refused(changed: dict[str, Any]) -> None:
    latest = SignedManifest(MANIFEST, bytes(64))
    message = messages.announcement_to(dataclasses.replace(QUIET, latest=latest))
    messages.announcement_from(message)
    for field, value in changed.items():
        setattr(message.latest.manifest, field, value)
    with pytest.raises(Malformed, match=next(iter(changed))):
        messages.announcement_from(message)


def test_a_request_for_a_chunk_beyond_the_largest_model_is_refused() -> None:
    digest = MANIFEST.update.digest
    assert messages.fetch_from(messages.fetch_to(digest, 7, True)) == (digest, 7, True)
    with pytest.raises(Malformed, match="first_chunk"):
        messages.fetch_from(pb.FetchRequest(digest=bytes(32), first_chunk=limits.CHUNKS_MAX + 1))


def test_the_largest_chunk_list_fits_into_a_message() -> None:
    piece = messages.list_to(limits.RAW_BYTES_MAX, HASHES[:1] * limits.CHUNKS_MAX)
    assert piece.ByteSize() <= limits.PIECE_BYTES_MAX
    raw_bytes, hashes = messages.list_from(piece)
    assert (raw_bytes, len(hashes)) == (limits.RAW_BYTES_MAX, limits.CHUNKS_MAX)


def test_the_largest_announcement_is_a_small_message() -> None:
    update = dataclasses.replace(MANIFEST.update, peer=PeerName("x" * 63), round=Round(ROUND_MAX))
    manifest = dataclasses.replace(
        MANIFEST, federation="f" * 128, update=update, base=MANIFEST.schema, dtype="bfloat16"
    )
    signed = SignedManifest(manifest, bytes(64))
    full = dataclasses.replace(
        QUIET,
        latest=signed,
        seen=(signed,) * limits.SEEN_MAX,
        evidence=(Evidence(signed, signed),) * limits.EVIDENCE_MAX,
    )
    message = messages.announcement_to(full)
    assert message.ByteSize() <= limits.SMALL_MESSAGE_BYTES_MAX
    assert messages.announcement_from(message) == full
    for field in ("seen", "evidence"):
        more = dataclasses.replace(full, **{field: getattr(full, field) * 2})
        with pytest.raises(Malformed, match="at most"):
            messages.announcement_from(messages.announcement_to(more))
