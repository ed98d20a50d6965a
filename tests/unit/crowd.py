"""A crowd at the door of a server that knows many peers: connects, says nothing, and stays.

A process of its own, because what may break is gRPC, and with it the process.  Prints by how many
MiB it has grown.

    python -m tests.unit.crowd
"""

from __future__ import annotations

import asyncio
import re
import socket
from contextlib import ExitStack
from pathlib import Path

from lightyear_node.identity import make_identity

from .sites import HELLO, NOW, B, FakeHost, calling, serving

PEERS, CROWD = 62, 500
DEADLINE_S = 60


def memory_mib() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) // 1024


async def main() -> None:
    peers = [B, *(make_identity(f"site-{n}", NOW) for n in range(PEERS))]
    async with serving(FakeHost(), peers=peers) as (server, address):
        host, _, port = address.rpartition(":")
        async with calling(address) as client:
            await client.hello(HELLO)
        before = memory_mib()
        with ExitStack() as crowd:
            for _ in range(CROWD):
                crowd.enter_context(socket.create_connection((host, int(port))))
            async with asyncio.timeout(DEADLINE_S):
                while len(server._doorway._knocks) < CROWD:  # noqa: ASYNC110 - gRPC's threads
                    await asyncio.sleep(0.05)
        async with calling(address) as client:
            await client.hello(HELLO)
        print(memory_mib() - before)


if __name__ == "__main__":
    asyncio.run(main())
