"""Measures a node's memory while it serves four peers and fetches from four.

The network part of a daemon in a separate process, over mutual TLS on loopback, with models of
25 MB (ten rounds) and of 1 GB.  Peak resident memory (VmHWM) must be equal within 32 MB.  The four
peers share one process.  Prints one JSON object.

    python tests/bench/memory.py [MB of the large model]
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from parts import sites

from lightyear_node.storage.blobs import BlobStore
from lightyear_node.types import Digest

HUB = "site-a"
OTHERS = [f"site-{letter}" for letter in "bcde"]
GOAL_MB = 32.0
ROUNDS_OF_SMALL = 10
"""Memory is stable only after some rounds."""


async def hub(home: Path, size_mb: int, digest: Digest) -> None:
    """The measured site: prints its port, reads those of the peers, prints its peak memory."""
    grid = sites.grid_of_mb(size_mb)
    server, host = sites.server_for(home, HUB, OTHERS, grid)
    print(await server.start("127.0.0.1:0"), flush=True)
    ports = json.loads(await asyncio.to_thread(sys.stdin.readline))

    rounds = rounds_of(size_mb)

    async def fetch(other: str, port: int) -> None:
        client = sites.client_for(home, HUB, other, f"127.0.0.1:{port}")
        store = BlobStore(home / f"hub-{other}")
        for _ in range(rounds):
            transfer = await client.fetch(sites.manifest_of(other, digest, grid), store, grid)
            assert transfer.raw_bytes == grid.raw_bytes
            store.retain(set())
        await client.close()

    async with asyncio.TaskGroup() as fetching:
        for other, port in zip(OTHERS, ports, strict=True):
            fetching.create_task(fetch(other, port))
    while host.uploads < rounds * len(OTHERS):  # noqa: ASYNC110 - no event to wait for
        await asyncio.sleep(0.05)
    print(json.dumps({"peak_mb": round(sites.peak_mb(), 1), "served": host.uploads}))
    sys.stdout.flush()
    await server.stop()


async def peers(home: Path, size_mb: int, digest: Digest, port: int) -> None:
    """The four peers: each offers the same file and fetches the hub's."""
    grid = sites.grid_of_mb(size_mb)
    servers = [sites.server_for(home, other, [HUB], grid)[0] for other in OTHERS]
    print(json.dumps([await server.start("127.0.0.1:0") for server in servers]), flush=True)

    async def fetch(other: str) -> None:
        client = sites.client_for(home, other, HUB, f"127.0.0.1:{port}")
        store = BlobStore(home / f"peers-{other}")
        for _ in range(rounds_of(size_mb)):
            await client.fetch(sites.manifest_of(HUB, digest, grid), store, grid)
            store.retain(set())
        await client.close()

    async with asyncio.TaskGroup() as fetching:
        for other in OTHERS:
            fetching.create_task(fetch(other))
    await asyncio.to_thread(sys.stdin.read)  # until the hub has fetched from all of them
    for server in servers:
        await server.stop()


def rounds_of(size_mb: int) -> int:
    return ROUNDS_OF_SMALL if size_mb < 100 else 1


def measure(size_mb: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        sites.make_keys(home, [HUB, *OTHERS])
        digest = sites.make_update(home, size_mb)
        this = [sys.executable, __file__]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([*this, "hub", folder, str(size_mb), digest], **pipes) as hub_process:
            assert hub_process.stdout
            assert hub_process.stdin
            port = hub_process.stdout.readline().strip()
            with subprocess.Popen(
                [*this, "peers", folder, str(size_mb), digest, port], **pipes
            ) as others:
                assert others.stdout
                hub_process.stdin.write(others.stdout.readline())
                hub_process.stdin.flush()
                found = json.loads(hub_process.stdout.readline())
                others.communicate()
            assert found["served"] == rounds_of(size_mb) * len(OTHERS)
            hub_process.communicate()
    peak_mb: float = found["peak_mb"]
    return peak_mb


def main() -> None:
    match sys.argv[1:]:
        case ["hub", folder, size, digest]:
            asyncio.run(hub(Path(folder), int(size), Digest(digest)))
        case ["peers", folder, size, digest, port]:
            asyncio.run(peers(Path(folder), int(size), Digest(digest), int(port)))
        case sizes:
            large = int(sizes[0]) if sizes else 1000
            peaks = {f"peak_mb_at_{size}_mb": measure(size) for size in (25, large)}
            apart = round(max(peaks.values()) - min(peaks.values()), 1)
            found = {**peaks, "apart_mb": apart, "goal_mb": GOAL_MB, "goal_met": apart <= GOAL_MB}
            print(json.dumps({"bench": "memory", "cores": os.cpu_count(), **found}))


if __name__ == "__main__":
    main()
