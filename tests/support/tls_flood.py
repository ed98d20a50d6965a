"""Opens many silent connections to a server with many peers, and keeps them open.

A separate process, because a bug in gRPC may crash it.  Prints by how many MiB it has grown.

    python -m tests.support.tls_flood
"""

from __future__ import annotations

import asyncio
import re
import socket
from contextlib import ExitStack
from pathlib import Path

from lightyear_node.errors import PeerUnreachable
from lightyear_node.identity.keys import make_identity
from tests.support.tls_sites import HELLO, NOW, B, FakeHost, calling, serving

PEERS, CONNECTIONS = 62, 500
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
        with ExitStack() as connections:
            for _ in range(CONNECTIONS):
                connections.enter_context(socket.create_connection((host, int(port))))
            async with asyncio.timeout(DEADLINE_S):
                while server.handshakes.pending < CONNECTIONS:  # noqa: ASYNC110 - gRPC's threads
                    await asyncio.sleep(0.05)
        # While gRPC clears the closed connections, a handshake may fail: peers try again.
        async with asyncio.timeout(DEADLINE_S):
            while not await answers(address):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.1)
        print(memory_mib() - before)


async def answers(address: str) -> bool:
    async with calling(address) as client:
        try:
            await client.hello(HELLO)
        except PeerUnreachable:
            return False
    return True


if __name__ == "__main__":
    asyncio.run(main())
