"""How fast an update travels, and in how much memory: two processes, mutual TLS, loopback.

Prints one JSON object: the median speed for a file of 100 MB; then the peak memory of each process
(VmHWM) when the same 400 MB travel as sixteen small files or as one large one, which must be the
same.  Processor seconds per GB tell more than the speed does on a machine with other work.

    python tests/bench/fetch.py
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from array import array
from datetime import UTC, datetime
from pathlib import Path

from lightyear_node.identity import Certificate, Identity, make_identity
from lightyear_node.records import (
    Announcement,
    Digest,
    Generation,
    Hello,
    Manifest,
    PeerName,
    Round,
    Transfer,
    Update,
)
from lightyear_node.store import Store
from lightyear_node.transport import limits
from lightyear_node.transport.client import PeerClient
from lightyear_node.transport.codec import Grid
from lightyear_node.transport.lines import Direct
from lightyear_node.transport.outbox import Offer
from lightyear_node.transport.server import ExchangeServer
from lightyear_node.transport.service import Service

MB = 1_000_000


class Host:
    """Offers everything in its store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def hello(self, peer: PeerName, hello: Hello) -> Hello:
        return hello

    async def announce(self, peer: PeerName, announcement: Announcement) -> Announcement:
        return announcement

    async def offer(self, peer: PeerName, digest: Digest) -> Offer | None:
        path = self._store.path(digest)
        hashes = await asyncio.to_thread(self._store.chunk_digests, digest)
        return Offer(digest, path, hashes, grid_of(path.stat().st_size))

    def served(self, peer: PeerName, transfer: Transfer) -> None:
        pass

    def denied(self, reason: str, peer: PeerName | None) -> None:
        raise SystemExit(f"{peer} was denied: {reason}")


def grid_of(raw_bytes: int) -> Grid:
    """Of a file of exactly so many bytes: one tensor of float32 after a header of 128 bytes."""
    size = raw_bytes - 128
    entry = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    text = json.dumps({"w": entry}).encode().ljust(120)
    return Grid(struct.pack("<Q", len(text)) + text)


def write_weights(path: Path, raw_bytes: int) -> None:
    """Normally distributed float32 values: mantissas that do not compress, exponents that do."""
    values = random.Random(7)
    with path.open("wb") as file:
        header = grid_of(raw_bytes).header
        file.write(header)
        left = raw_bytes - len(header)
        block = _floats(values, 1 << 18)
        while left > 0:
            # The same million values, rotated, so that making them does not outlast the bench.
            cut = 4 * values.randrange(1 << 18)
            file.write((block[cut:] + block[:cut])[:left])
            left -= len(block)


def _floats(values: random.Random, count: int) -> bytes:
    return array("f", (values.gauss(0.0, 0.05) for _ in range(count))).tobytes()


def spent() -> tuple[float, float]:
    """This process's peak memory in MB and its processor seconds."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024 / MB, time.process_time()


async def serve(home: Path) -> None:
    limits.CALLS_BURST = 10_000
    """The child: prints its port, serves until its input ends, prints what it spent."""
    identity = Identity.load(home / "a")
    certificate = Certificate.parse((home / "b.der").read_bytes())
    store = Store(home / "offered")
    host = Host(store)
    service = Service(host, home)
    server = ExchangeServer(identity, {PeerName("site-b"): [certificate]}, service, host)
    print(await server.start("127.0.0.1:0"), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    print(json.dumps(spent()), flush=True)
    await server.stop()


async def fetch(home: Path, port: int, digest: Digest, raw_bytes: int, repeats: int) -> None:
    """The other child: fetches as often as asked, prints how long each took and what it spent."""
    identity = Identity.load(home / "b")
    certificate = Certificate.parse((home / "a.der").read_bytes())
    update = Update(PeerName("site-a"), Generation(0), Round(0), digest)
    manifest = Manifest("bench", update, 0, Digest("0" * 64), raw_bytes, 0)
    peer = PeerName("site-a")
    client = PeerClient(peer, Direct(peer, f"127.0.0.1:{port}", [certificate], identity))
    transfers = []
    for _ in range(repeats):
        store = Store(home / "fetched")
        transfers.append(await client.fetch(manifest, store, grid_of(raw_bytes)))
        store.retain(set())
    await client.close()
    seconds = [transfer.seconds for transfer in transfers]
    print(json.dumps([seconds, transfers[0].wire_bytes, spent()]))


def measure(size_mb: int, repeats: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        home, raw_bytes = Path(folder), size_mb * MB
        for name in ("a", "b"):
            identity = make_identity(f"site-{name}", datetime.now(UTC))
            identity.save(home / name)
            (home / f"{name}.der").write_bytes(identity.certificate.der)
        store = Store(home / "offered")
        write_weights(store.scratch_path(), raw_bytes)
        (written,) = store.folder.iterdir()
        digest = store.adopt(written).digest
        this = [sys.executable, __file__]
        with subprocess.Popen(
            [*this, "serve", folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout
            port = server.stdout.readline().strip()
            output = subprocess.run(
                [*this, "fetch", folder, port, digest, str(raw_bytes), str(repeats)],
                stdout=subprocess.PIPE,
                check=True,
            ).stdout
            sender_peak_mb, sender_s = json.loads(server.communicate()[0])
    seconds, wire_bytes, (receiver_peak_mb, receiver_s) = json.loads(output)
    moved_gb = size_mb * repeats / 1000
    return {
        "mb_per_s": round(size_mb / statistics.median(seconds), 1),
        "wire_share": round(wire_bytes / raw_bytes, 3),
        "sender_peak_mb": round(sender_peak_mb, 1),
        "receiver_peak_mb": round(receiver_peak_mb, 1),
        "sender_cpu_s_per_gb": round(sender_s / moved_gb, 1),
        "receiver_cpu_s_per_gb": round(receiver_s / moved_gb, 1),
    }


def main() -> None:
    match sys.argv[1:]:
        case ["serve", folder]:
            asyncio.run(serve(Path(folder)))
        case ["fetch", folder, port, digest, *numbers]:
            raw_bytes, repeats = map(int, numbers)
            asyncio.run(fetch(Path(folder), int(port), Digest(digest), raw_bytes, repeats))
        case _:
            runs = {"speed_100_mb": measure(100, 5)}
            runs |= {"memory_16x25_mb": measure(25, 16), "memory_1x400_mb": measure(400, 1)}
            print(json.dumps({"bench": "fetch", "cores": os.cpu_count(), **runs}))


if __name__ == "__main__":
    main()
