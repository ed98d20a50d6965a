"""Measures the cost of refusing a hostile message: at most 50 ms of CPU time and 16 MiB.

Every kind of message takes the path of a peer's bytes: chunks are decoded and hashed, messages are
parsed and checked.  Memory is the larger of Python's allocations (tracemalloc) and the growth of
the process (VmHWM), since libraries allocate in C.  Prints one JSON object; `goal_met` tells
whether the worst kind meets the goals.  The cost of files is only shown: they are read on an
operator's request.

    python tests/bench/hostile.py
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import statistics
import struct
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import zstandard
from google.protobuf.message import DecodeError

from lightyear_node.config.federation import load_federation_config
from lightyear_node.errors import ConfigError
from lightyear_node.identity.invite import invite_line, parse_invite
from lightyear_node.identity.keys import make_identity
from lightyear_node.protocol.manifests import refusal
from lightyear_node.storage.blobs import BlobStore, ChunkRefused, IncomingBlob, chunk_count
from lightyear_node.transport import limits, messages
from lightyear_node.transport.codec import ChunkGrid, decode_chunk, encode_chunk
from lightyear_node.transport.handlers import parsed
from lightyear_node.types import (
    CHUNK_BYTES,
    Announcement,
    Digest,
    Generation,
    Manifest,
    PeerName,
    Reason,
    Round,
    SignedManifest,
    Update,
)
from lightyear_node.v1 import exchange_pb2 as pb

CPU_MS_MAX, MIB_MAX = 50.0, 16.0
REPEATS = 5
MIB = 1 << 20
REFUSALS = (ConfigError, ChunkRefused, messages.Malformed, DecodeError)

SITE = make_identity("site-b", datetime.now(UTC))
COUNT = CHUNK_BYTES // 4
PLANES = 4


def grid_of_two_chunks() -> ChunkGrid:
    entry = {"dtype": "F32", "shape": [2 * COUNT], "data_offsets": [0, 8 * COUNT]}
    text = json.dumps({"w": entry}).encode().ljust(120)
    return ChunkGrid(struct.pack("<Q", len(text)) + text)


# The second chunk has no header: a megabyte of values.
GRID, INDEX = grid_of_two_chunks(), 1
WEIGHTS = np.random.default_rng(7).normal(0, 0.05, COUNT).astype(np.float32).tobytes()


def frame(*planes: bytes, kind: int = 0, method: int = 1) -> bytes:
    return bytes([kind]) + b"".join(struct.pack("<BI", method, len(p)) + p for p in planes)


def frames() -> dict[str, bytes]:
    packed = zstandard.compress(bytes(COUNT))
    magic, size = zstandard.FRAME_HEADER, struct.pack("<I", COUNT)
    good = encode_chunk(GRID, INDEX, WEIGHTS)
    return {
        "bomb": frame(zstandard.compress(bytes(1 << 30))),
        "bomb in the last plane": frame(*[packed] * 3, zstandard.compress(bytes(1 << 30))),
        "window of 128 MiB": frame(magic + bytes([0x80, (27 - 10) << 3]) + size + bytes(8)),
        "states 1 TiB": frame(magic + bytes([0xE0]) + struct.pack("<Q", 1 << 40) + bytes(8)),
        "skippable frame": frame(struct.pack("<II", 0x184D2A50, 4) + b"abcd" + packed),
        "concatenated frames": frame(packed + packed),
        "garbage tail": good + b"tail",
        "truncated frame": good[:-9],
        "unsolicited delta": frame(*[packed] * PLANES, kind=1),
        "oversized frame": bytes(limits.PIECE_BYTES_MAX - 64),
        "other weights": encode_chunk(GRID, INDEX, bytes(reversed(WEIGHTS))),
        "nothing but zeros": frame(*[packed] * PLANES),
    }


def take_chunk(wire: bytes) -> None:
    """As in a fetch: parse, decode, compare the hash."""
    piece = pb.Piece.FromString(wire)
    raw = decode_chunk(GRID, INDEX, messages.chunk_from(piece, INDEX))
    if hashlib.sha256(raw).digest() != hashlib.sha256(WEIGHTS).digest():
        raise ChunkRefused(Reason.CHECKSUM, "another chunk")


def take_list(wire: bytes) -> None:
    raw_bytes, chunk_digests = messages.list_from(pb.Piece.FromString(wire))
    with tempfile.TemporaryDirectory() as folder:
        IncomingBlob.open(BlobStore(Path(folder)), Digest("0" * 64), raw_bytes, chunk_digests)


def take_announcement(wire: bytes) -> None:
    """As the server and then the gossip do."""
    announcement = messages.announcement_from(parsed(pb.Announcement, wire))
    if announcement.latest is None:
        raise messages.Malformed("nothing announced")
    found = refusal(
        announcement.latest,
        peer=SITE.name,
        federation="chest-xray",
        schema=Digest("cd" * 32),
        raw_bytes=1000,
        dtype="float32",
        verify_keys=[SITE.certificate.signing_key] * 2,
    )
    if found is not None:
        raise messages.Malformed(found[1])


def take_greeting(wire: bytes) -> None:
    messages.hello_from(parsed(pb.Greeting, wire))


def take_join_line(wire: bytes) -> None:
    parse_invite(wire.decode(errors="surrogateescape"))


def take_config(text: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(text)
        file.flush()
        load_federation_config(Path(file.name))


def announcements() -> dict[str, bytes]:
    update = Update(PeerName("site-b"), Generation(0), Round(7), Digest("ab" * 32))
    manifest = Manifest("chest-xray", update, 99, Digest("cd" * 32), 1000, 500)
    forged = Announcement(1, Round(7), "collecting", SignedManifest(manifest, bytes(64)))
    larger = SITE.sign_manifest(Manifest("chest-xray", update, 99, Digest("cd" * 32), 1 << 61, 500))
    huge = Announcement(1, Round(7), "collecting", larger)
    nested = b""
    while len(nested) < 60_000:
        nested = b"\x22" + _varint(len(nested)) + nested
    return {
        "forged signature": messages.announcement_to(forged).SerializeToString(),
        "update of 2 EiB": messages.announcement_to(huge).SerializeToString(),
        "round beyond all": pb.Announcement(round=2**62 + 1).SerializeToString(),
        "no message": b"\xff" * 60_000,
        "unknown fields": b"\xf8\x07\x01" * 20_000,
        "groups in groups": b"\x7b" * 60_000,
        "nested messages": nested,
        "announcement of 64 KiB": pb.Announcement(phase="x" * 65_000).SerializeToString(),
        "announcement of 2 MiB": pb.Announcement(phase="x" * 2_000_000).SerializeToString(),
    }


def kinds() -> dict[str, tuple[Callable[[bytes], None], bytes]]:
    chunks = {
        name: (take_chunk, messages.chunk_to(INDEX, wire).SerializeToString())
        for name, wire in frames().items()
    }
    hashes = (b"\1" * 32,) * chunk_count(limits.RAW_BYTES_MAX)
    largest = messages.list_to(limits.RAW_BYTES_MAX, hashes).SerializeToString()
    lists = {
        "list of the largest model": (take_list, largest),
        "list of 1 EiB": (take_list, messages.list_to(1 << 60, hashes).SerializeToString()),
        "piece of 2 MiB": (take_list, messages.list_to(1, hashes * 7).SerializeToString()),
    }
    announced = {name: (take_announcement, wire) for name, wire in announcements().items()}
    greetings = {"greeting of 64 KiB": (take_greeting, b"\x1a\xe8\xfb\x03" + b"x" * 65_000)}
    line = invite_line(SITE, "a.example.org:7443")
    lines = {
        "altered join line": (take_join_line, line[:-9].encode() + b"AAAAAAAAA"),
        "join line of 1 MiB": (take_join_line, b"ly1/" + b"x" * MIB),
        "join line of slashes": (take_join_line, b"ly1" + b"/" * MIB),
    }
    return {**chunks, **lists, **announced, **greetings, **lines}


def files() -> dict[str, tuple[Callable[[bytes], None], bytes]]:
    aliases = "a: &a [x]\n" + "".join(f"{b}: &{b} [*{a},*{a}]\n" for a, b in ("ab", "bc", "cd"))
    return {
        "yaml of aliases": (take_config, aliases.encode()),
        "yaml of brackets": (take_config, b"[" * (MIB - 1)),
        "yaml of 2 MiB": (take_config, b"a: 1\n" * 400_000),
        "yaml of 64 KiB of keys": (
            take_config,
            "".join(f"k{n}: 1\n" for n in range(7000)).encode(),
        ),
    }


def _varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def refused(take: Callable[[bytes], None], wire: bytes) -> None:
    try:
        take(wire)
    except REFUSALS:
        return
    raise SystemExit("a hostile message was accepted")


def process_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def grown_by(take: Callable[[bytes], None], wire: bytes) -> float:
    """Peak growth in MiB, of Python's heap or of the process; without the message itself."""
    tracemalloc.start()
    refused(take, wire)
    _, traced = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = process_bytes("VmRSS")
    refused(take, wire)
    return max(traced, process_bytes("VmHWM") - before) / MIB


def measure(take: Callable[[bytes], None], wire: bytes) -> dict[str, float]:
    refused(take, wire)
    spent = []
    for _ in range(REPEATS):
        started = time.process_time()
        refused(take, wire)
        spent.append(1000 * (time.process_time() - started))
    return {"cpu_ms": round(statistics.median(spent), 2), "mib": round(grown_by(take, wire), 2)}


def main() -> None:
    if not sys.platform.startswith("linux"):
        print(json.dumps({"bench": "hostile", "skipped": "reads /proc"}))
        return
    measured = {name: measure(*kind) for name, kind in kinds().items()}
    worst = {
        unit: max((one[unit], name) for name, one in measured.items()) for unit in ("cpu_ms", "mib")
    }
    met = worst["cpu_ms"][0] <= CPU_MS_MAX and worst["mib"][0] <= MIB_MAX
    print(
        json.dumps(
            {
                "bench": "hostile",
                "cores": os.cpu_count(),
                "goal": {"cpu_ms": CPU_MS_MAX, "mib": MIB_MAX},
                "goal_met": met,
                "worst": worst,
                "messages": measured,
                "files": {name: measure(*kind) for name, kind in files().items()},
            }
        )
    )


if __name__ == "__main__":
    main()
