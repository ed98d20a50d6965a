"""A member with a valid certificate that sends rubbish: refused, counted, and the node goes on."""

from __future__ import annotations

import asyncio
import hashlib
import struct
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import zstandard
from asking import DEADLINE_S, A, B, LayOut, metrics_of

from lightyear_node.identity import Identity
from lightyear_node.lab.federation import Federation, SiteHome
from lightyear_node.records import (
    CHUNK_BYTES,
    Announcement,
    Digest,
    Generation,
    Hello,
    Manifest,
    Reason,
    Round,
    SignedManifest,
    Update,
)
from lightyear_node.store import chunk_count, chunk_length, tree_digest
from lightyear_node.transport import messages
from lightyear_node.transport.client import PeerClient
from lightyear_node.transport.codec import Grid, encode_chunk
from lightyear_node.transport.lines import Direct
from lightyear_node.v1 import exchange_pb2 as pb
from lightyear_node.v1 import exchange_pb2_grpc


class Member(exchange_pb2_grpc.ExchangeServicer):
    """Speaks the real protocol with site-b's keys; what it sends of an update is up to `send`."""

    def __init__(self, node: SiteHome, ourselves: SiteHome) -> None:
        self.identity = Identity.load(ourselves.directory / "keys")
        self.address = ourselves.address
        self.node = Identity.load(node.directory / "keys").certificate
        line = Direct(node.name, node.address, [self.node], self.identity)
        self.client = PeerClient(node.name, line)
        self.send: Callable[[Any], Awaitable[None]]
        self.latest: SignedManifest | None = None
        self.met: Hello | None = None
        self.lamport = 1

    async def serve(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        exchange_pb2_grpc.add_ExchangeServicer_to_server(self, server)
        keys = [(self.identity.tls_key_pem, self.identity.certificate.pem)]
        credentials = grpc.ssl_server_credentials(keys, self.node.pem, require_client_auth=True)
        server.add_secure_port(self.address, credentials)
        await server.start()
        return server

    async def Hello(self, request: Any, context: Any) -> Any:
        self.met = messages.hello_from(request)
        return request  # whatever the node says of itself, we say too

    async def Announce(self, request: Any, context: Any) -> Any:
        self.lamport = messages.announcement_from(request).lamport + 1
        said = Announcement(self.lamport, Round(0), "collecting", self.latest)
        return messages.announcement_to(said)

    async def Fetch(self, request: Any, context: Any) -> None:
        await self.send(context)

    def promise(self, round: int, raw_bytes: int, chunk_hashes: list[bytes]) -> None:
        """Sign and announce, from the next heartbeat on, an update with these chunks."""
        assert self.met is not None
        digest = tree_digest(raw_bytes, chunk_hashes)
        update = Update(self.identity.name, Generation(0), Round(round), digest)
        schema = Digest(self.met.schema)
        manifest = Manifest(self.met.federation, update, self.lamport, schema, raw_bytes, 1)
        self.latest = self.identity.sign_manifest(manifest)


async def wait_for(node: SiteHome, series: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (await asyncio.to_thread(metrics_of, node)).get(series, 0.0) < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.2)


def grid_of(node: SiteHome) -> Grid:
    with next((node.state_dir / "updates").iterdir()).open("rb") as file:
        length = file.read(8)
        return Grid(length + file.read(int.from_bytes(length, "little")))


def failed(reason: Reason) -> str:
    return f'lightyear_transfer_errors_total{{peer="site-b",reason="{reason}"}}'


def test_rubbish_from_a_member_is_refused_with_its_reason(lay_out_sites: LayOut) -> None:
    node, ourselves = lay_out_sites(2, rounds=50)

    async def misbehave(grid: Grid) -> None:
        raw_bytes = grid.raw_bytes
        member = Member(node, ourselves)
        server = await member.serve()
        try:
            async with asyncio.timeout(DEADLINE_S):
                while member.met is None:  # noqa: ASYNC110 - the node greets us when it likes
                    await asyncio.sleep(0.1)
            chunks = [bytes(chunk_length(raw_bytes, i)) for i in range(chunk_count(raw_bytes))]
            hashes = [hashlib.sha256(chunk).digest() for chunk in chunks]
            listed = messages.list_to(raw_bytes, tuple(hashes))

            async def another_list(context: Any) -> None:
                await context.write(messages.list_to(raw_bytes, (b"\1" * 32,) * len(hashes)))

            async def another_chunk(context: Any) -> None:
                await context.write(listed)
                frame = encode_chunk(grid, 0, b"\1" * len(chunks[0]))
                await context.write(messages.chunk_to(0, frame))

            async def a_bomb(context: Any) -> None:
                await context.write(listed)
                plane = zstandard.compress(bytes(64 * CHUNK_BYTES))
                frame = b"\0" + struct.pack("<BI", 1, len(plane)) + plane
                await context.write(messages.chunk_to(0, frame))

            async def the_end(context: Any) -> None:
                await context.write(listed)

            async def nonsense(context: Any) -> None:
                await context.write(pb.Piece())

            for number, (send, reason) in enumerate(
                [
                    (another_list, Reason.CHECKSUM),
                    (the_end, Reason.TRUNCATED),
                    (nonsense, Reason.MALFORMED),
                    (another_chunk, Reason.CHECKSUM),
                    (a_bomb, Reason.TOO_LARGE),
                ]
            ):
                member.send = send
                member.promise(number, raw_bytes, hashes)
                await wait_for(node, failed(reason))
            # Larger than our own model: refused before a byte is asked for.
            member.promise(100, raw_bytes + 1, hashes)
            refused = 'lightyear_peer_refusals_total{peer="site-b",reason="too_large"}'
            await wait_for(node, refused)
        finally:
            await member.client.close()
            await server.stop(None)

    with Federation([node]) as federation:
        statuses = federation.wait_until(
            lambda s: s[A] is not None and s[A]["phase"] == "collecting", DEADLINE_S
        )
        assert statuses[A] is not None
        asyncio.run(misbehave(grid_of(node)))
        federation.check()
        # Of two sites none may be faulty, so the other's rounds are believed; its bytes never are.
        verdicts = [v for entry in federation.rounds(A) for v in entry["verdicts"]]
        assert verdicts
        assert {(v["peer"], v["accepted"], v["digest"]) for v in verdicts} == {(B, False, None)}
        with urllib.request.urlopen(f"http://{node.http_address}/readyz") as answer:
            assert answer.status == 200
    assert "Traceback" not in node.log.read_text()
