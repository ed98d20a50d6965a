"""Measures the throughput of a fetch between two processes: mutual TLS, loopback.

Compared with a bare grpc.aio stream of the same pieces with the same options, which are read and
discarded.  A fetch also decodes, hashes and writes them, and syncs the file; it is measured with
the receiver's store in memory and on disk.  Alternating, so that other load affects all of them
alike; ratios are those of medians.  Prints one JSON object.

    python tests/bench/fetch.py
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from parts import sites
from parts.sites import MB

from lightyear_node.storage.blobs import BlobStore
from lightyear_node.transport import limits
from lightyear_node.transport.codec import encode_chunk
from lightyear_node.types import CHUNK_BYTES, Digest

SIZE_MB = 100
REPEATS = 7
US, THEM = "site-b", "site-a"


async def serve(home: Path, digest: Digest) -> None:
    """Runs both servers in the child: prints their ports, serves until its input ends."""
    grid = sites.grid_of_mb(SIZE_MB)
    server, _ = sites.server_for(home, THEM, [US], grid)
    with BlobStore(home / "offered").path(digest).open("rb") as file:
        frames = [encode_chunk(grid, i, file.read(CHUNK_BYTES)) for i in range(grid.chunks)]

    async def send(_: Any, context: Any) -> None:
        await context.read()
        for frame in frames:
            await context.write(frame)

    bare = grpc.aio.server(options=limits.SERVER_OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(send)
    bare.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("Bare", {"Send": handler}),)
    )
    identity = sites.identity_of(home, THEM)
    credentials = grpc.ssl_server_credentials(
        [(identity.tls_key_pem, identity.certificate.pem)],
        sites.certificate_of(home, US).pem,
        require_client_auth=True,
    )
    ports = [await server.start("127.0.0.1:0"), bare.add_secure_port("127.0.0.1:0", credentials)]
    await bare.start()
    print(json.dumps(ports), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    print(time.process_time(), flush=True)
    await bare.stop(None)
    await server.stop()


async def read_bare(home: Path, port: int) -> tuple[float, int]:
    identity = sites.identity_of(home, US)
    credentials = grpc.ssl_channel_credentials(
        sites.certificate_of(home, THEM).pem, identity.tls_key_pem, identity.certificate.pem
    )
    options = (*limits.CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", THEM))
    address = f"127.0.0.1:{port}"
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        await channel.channel_ready()
        started, count = sites.now(), 0
        call = channel.unary_stream("/Bare/Send")(b"all")
        while (piece := await call.read()) is not grpc.aio.EOF:
            count += len(piece)
        return sites.now() - started, count


async def fetch(home: Path, port: int, digest: Digest, folder: Path) -> float:
    grid = sites.grid_of_mb(SIZE_MB)
    client = sites.client_for(home, US, THEM, f"127.0.0.1:{port}")
    store = BlobStore(folder)
    transfer = await client.fetch(sites.manifest_of(THEM, digest, grid), store, grid)
    assert store.has(digest)
    store.retain(set())
    await client.close()
    return transfer.seconds


async def measure(home: Path, memory: Path, digest: Digest, ports: list[int]) -> dict[str, Any]:
    await fetch(home, ports[0], digest, memory)  # encodes the update for all further fetches
    seconds: dict[str, list[float]] = {"bare": [], "fetch": [], "fetch_to_disk": []}
    cpu_s = dict.fromkeys(seconds, 0.0)
    wire_bytes = 0
    for _ in range(REPEATS):
        for name in seconds:
            spent = time.process_time()
            if name == "bare":
                took, wire_bytes = await read_bare(home, ports[1])
            else:
                took = await fetch(home, ports[0], digest, memory if name == "fetch" else home)
            seconds[name].append(took)
            cpu_s[name] += time.process_time() - spent
    median = {name: statistics.median(all_s) for name, all_s in seconds.items()}
    return {
        "raw_mb_s": {name: round(SIZE_MB / median_s) for name, median_s in median.items()},
        "wire_share": round(wire_bytes / (SIZE_MB * MB), 3),
        "receiver_cpu_s_per_gb": {
            name: round(1000 * spent / SIZE_MB / REPEATS, 2) for name, spent in cpu_s.items()
        },
        "fetch_to_bare": round(median["bare"] / median["fetch"], 2),
        "fetch_to_disk_to_bare": round(median["bare"] / median["fetch_to_disk"], 2),
    }


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        asyncio.run(serve(Path(sys.argv[2]), Digest(sys.argv[3])))
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as fast,
    ):
        home = Path(folder)
        sites.make_keys(home, [US, THEM])
        digest = sites.make_update(home, SIZE_MB)
        child = subprocess.Popen(
            [sys.executable, __file__, "serve", folder, digest],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with child:
            assert child.stdout
            ports = json.loads(child.stdout.readline())
            found = asyncio.run(measure(home, Path(fast), digest, ports))
            child.communicate()
    goal = {"goal": 0.8, "goal_met": found["fetch_to_bare"] >= 0.8}
    print(json.dumps({"bench": "fetch", "cores": os.cpu_count(), **found, **goal}))


if __name__ == "__main__":
    main()
