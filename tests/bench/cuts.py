"""Measures how many bytes are sent again when the connection is cut every two seconds.

Fetches 60 MB through a proxy with 8 MB/s that cuts all connections every 2 s, and without cuts.
Prints one JSON object; the goal is at most two chunks per cut.

    python tests/bench/cuts.py
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from parts import sites

from lightyear_node.storage.blobs import BlobStore
from lightyear_node.types import CHUNK_BYTES, Digest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.bad_network_proxy import ChaosProxy, Counts

SIZE_MB = 60
RATE_BYTES_S = 8 * sites.MB
CUT_EVERY_S = 2.0
US, THEM = "site-b", "site-a"


async def fetch(home: Path, digest: Digest, cut_every_s: float | None) -> tuple[Counts, float]:
    grid = sites.grid_of_mb(SIZE_MB)
    server, _ = sites.server_for(home, THEM, [US], grid)
    port = await server.start("127.0.0.1:0")
    with ChaosProxy(f"127.0.0.1:{port}") as proxy:
        proxy.rate_bytes_s = RATE_BYTES_S
        proxy.cut_every_s = cut_every_s
        client = sites.client_for(home, US, THEM, proxy.address)
        store = BlobStore(home / f"fetched-{cut_every_s}")
        transfer = await client.fetch(sites.manifest_of(THEM, digest, grid), store, grid)
        assert store.verify(digest)
        counts = proxy.counts
        await client.close()
    await server.stop()
    return counts, transfer.seconds


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        sites.make_keys(home, [US, THEM])
        digest = sites.make_update(home, SIZE_MB)
        uncut, uncut_s = await fetch(home, digest, None)
        cut, cut_s = await fetch(home, digest, CUT_EVERY_S)
    resent = cut.from_target - uncut.from_target
    per_cut = resent / max(1, cut.cuts) / CHUNK_BYTES
    found = {
        "cuts": cut.cuts,
        "bytes_without_cuts": uncut.from_target,
        "bytes_with_cuts": cut.from_target,
        "chunks_again_per_cut": round(per_cut, 2),
        "slower": round(cut_s / uncut_s, 2),
        "goal_met": per_cut <= 2 and cut.cuts > 0,
    }
    print(json.dumps({"bench": "cuts", **found}))


if __name__ == "__main__":
    asyncio.run(main())
