"""Minimal sites for transfers: keys, and a host that offers files."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from lightyear_node.errors import DamagedFile
from lightyear_node.identity.keys import Certificate, Identity, make_identity
from lightyear_node.storage.blobs import BlobStore, hash_file
from lightyear_node.transport import limits
from lightyear_node.transport.channel import DirectChannel
from lightyear_node.transport.client import PeerClient
from lightyear_node.transport.codec import ChunkGrid
from lightyear_node.transport.handlers import Handlers
from lightyear_node.transport.server import ExchangeServer
from lightyear_node.transport.upload_cache import Upload
from lightyear_node.types import (
    Announcement,
    Digest,
    Generation,
    Hello,
    Manifest,
    PeerName,
    Reason,
    Round,
    Transfer,
    Update,
)
from parts.weights import grid_for, write_weights

MB = 1_000_000
# Benchmarks fetch far more often than a site does.
limits.CALLS_BURST = 1_000_000


def grid_of_mb(size_mb: int) -> ChunkGrid:
    return grid_for(size_mb * MB // 4)


def make_keys(home: Path, names: Sequence[str]) -> None:
    for name in names:
        identity = make_identity(name, datetime.now(UTC))
        identity.save(home / name)
        (home / f"{name}.der").write_bytes(identity.certificate.der)


def identity_of(home: Path, name: str) -> Identity:
    return Identity.load(home / name)


def certificate_of(home: Path, name: str) -> Certificate:
    return Certificate.parse((home / f"{name}.der").read_bytes())


def make_update(home: Path, size_mb: int, seed: int = 7) -> Digest:
    """Write random weights to the store `offered`."""
    store = BlobStore(home / "offered")
    scratch = store.scratch_path()
    write_weights(scratch, grid_of_mb(size_mb), seed)
    return store.adopt(scratch).digest


class OfferingHost:
    """Offers every file in its store."""

    def __init__(self, home: Path, grid: ChunkGrid) -> None:
        self._store = BlobStore(home / "offered")
        self._grid = grid
        self._lists: dict[Digest, tuple[bytes, ...]] = {}
        self.uploads = 0

    async def hello(self, peer: PeerName, hello: Hello) -> Hello:
        return hello

    async def announce(self, peer: PeerName, announcement: Announcement) -> Announcement:
        return announcement

    async def offer(self, peer: PeerName, digest: Digest) -> Upload | None:
        path = self._store.path(digest)
        if digest not in self._lists:
            self._lists[digest] = hash_file(path)[2]
        return Upload(digest, path, self._lists[digest], self._grid)

    def upload_finished(self, peer: PeerName, transfer: Transfer) -> None:
        self.uploads += 1

    def upload_failed(self, peer: PeerName, reason: Reason) -> None:
        """Ignored: some benchmarks cut connections."""

    def strangers_closed(self, count: int) -> None:
        pass

    def denied(self, reason: str, peer: PeerName | None) -> None:
        raise SystemExit(f"{peer} was denied: {reason}")

    def damaged(self, problem: DamagedFile) -> None:
        raise SystemExit(str(problem))


def server_for(
    home: Path, name: str, callers: Sequence[str], grid: ChunkGrid
) -> tuple[ExchangeServer, OfferingHost]:
    host = OfferingHost(home, grid)
    pins = {PeerName(caller): [certificate_of(home, caller)] for caller in callers}
    return ExchangeServer(identity_of(home, name), pins, Handlers(host, home), host), host


def client_for(home: Path, name: str, peer: str, address: str) -> PeerClient:
    channel = DirectChannel(
        PeerName(peer), address, [certificate_of(home, peer)], identity_of(home, name)
    )
    return PeerClient(PeerName(peer), channel)


def manifest_of(peer: str, digest: Digest, grid: ChunkGrid) -> Manifest:
    update = Update(PeerName(peer), Generation(0), Round(0), digest)
    return Manifest("bench", update, 0, Digest("0" * 64), grid.raw_bytes, 0)


def peak_mb() -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024 / MB


def now() -> float:
    return time.perf_counter()
