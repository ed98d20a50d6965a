"""Two sites' keys, and a host that offers one file: the least that a transfer needs."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
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
    Reason,
    Round,
    Transfer,
    Update,
)
from lightyear_node.store import Store, hash_file
from lightyear_node.transport import limits
from lightyear_node.transport.client import PeerClient
from lightyear_node.transport.codec import Grid
from lightyear_node.transport.lines import Direct
from lightyear_node.transport.outbox import Offer
from lightyear_node.transport.server import ExchangeServer
from lightyear_node.transport.service import Service
from parts.weights import grid_for, write_weights

MB = 1_000_000
# Benchmarks fetch the same thing far more often than any site does.
limits.CALLS_BURST = 1_000_000


def grid_of_mb(size_mb: int) -> Grid:
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
    """In the store `offered`."""
    store = Store(home / "offered")
    scratch = store.scratch_path()
    write_weights(scratch, grid_of_mb(size_mb), seed)
    return store.adopt(scratch).digest


class Host:
    """Offers everything in its store."""

    def __init__(self, home: Path, grid: Grid) -> None:
        self._store = Store(home / "offered")
        self._grid = grid
        self._lists: dict[Digest, tuple[bytes, ...]] = {}
        self.served_count = 0

    async def hello(self, peer: PeerName, hello: Hello) -> Hello:
        return hello

    async def announce(self, peer: PeerName, announcement: Announcement) -> Announcement:
        return announcement

    async def offer(self, peer: PeerName, digest: Digest) -> Offer | None:
        path = self._store.path(digest)
        if digest not in self._lists:
            self._lists[digest] = hash_file(path)[2]
        return Offer(digest, path, self._lists[digest], self._grid)

    def served(self, peer: PeerName, transfer: Transfer) -> None:
        self.served_count += 1

    def not_served(self, peer: PeerName, reason: Reason) -> None:
        """The line broke; it may, where that is what is measured."""

    def denied(self, reason: str, peer: PeerName | None) -> None:
        raise SystemExit(f"{peer} was denied: {reason}")


def server_for(
    home: Path, name: str, callers: Sequence[str], grid: Grid
) -> tuple[ExchangeServer, Host]:
    host = Host(home, grid)
    pins = {PeerName(caller): [certificate_of(home, caller)] for caller in callers}
    return ExchangeServer(identity_of(home, name), pins, Service(host, home), host), host


def client_for(home: Path, name: str, peer: str, address: str) -> PeerClient:
    line = Direct(PeerName(peer), address, [certificate_of(home, peer)], identity_of(home, name))
    return PeerClient(PeerName(peer), line)


def manifest_of(peer: str, digest: Digest, grid: Grid) -> Manifest:
    update = Update(PeerName(peer), Generation(0), Round(0), digest)
    return Manifest("bench", update, 0, Digest("0" * 64), grid.raw_bytes, 0)


def peak_mb() -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024 / MB


def now() -> float:
    return time.perf_counter()
