"""A member of a federation with a valid certificate that can send arbitrary bytes.

Implements the protocol without its checks: greetings, announcements and pieces can be anything,
even unparsable.  By default it behaves correctly; `behaviours` change that.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import yaml

from lightyear_node.identity.keys import Identity
from lightyear_node.storage.blobs import tree_digest
from lightyear_node.transport import messages
from lightyear_node.transport.codec import ChunkGrid, encode_chunk
from lightyear_node.types import (
    CHUNK_BYTES,
    Announcement,
    Digest,
    Generation,
    Hello,
    Manifest,
    Round,
    SignedManifest,
    Update,
)
from lightyear_node.v1 import exchange_pb2 as pb

PACKAGE = "/lightyear_node.v1.Exchange/"
AHEAD = 1000
"""Rounds by which an announced update is ahead of the node, so that the node always wants it."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A complete weights file of the federation's model."""

    grid: ChunkGrid
    content: bytes

    @property
    def chunks(self) -> list[bytes]:
        steps = range(0, len(self.content), CHUNK_BYTES)
        return [self.content[i : i + CHUNK_BYTES] for i in steps]

    @property
    def hashes(self) -> tuple[bytes, ...]:
        return tuple(hashlib.sha256(chunk).digest() for chunk in self.chunks)

    @property
    def tensors(self) -> bytes:
        return self.content[len(self.grid.header) :]

    def with_tensors(self, tensors: bytes) -> Weights:
        assert len(tensors) == len(self.tensors)
        return Weights(self.grid, self.grid.header + tensors)

    def pieces(self) -> list[bytes]:
        """The pieces that an honest site would send."""
        listed = messages.list_to(len(self.content), self.hashes)
        frames = [encode_chunk(self.grid, i, chunk) for i, chunk in enumerate(self.chunks)]
        chunks = [messages.chunk_to(i, frame) for i, frame in enumerate(frames)]
        return [message.SerializeToString() for message in (listed, *chunks)]


class Member:
    """To be made and used within one event loop."""

    def __init__(self, home: Path, node: Path) -> None:
        self.identity = Identity.load(home / "keys")
        self.node = Identity.load(node / "keys").certificate
        self.address = str(yaml.safe_load((home / "node.yaml").read_text())["listen"])
        self.node_address = str(yaml.safe_load((node / "node.yaml").read_text())["listen"])
        self.node_home = node
        self.node_greeting: Hello | None = None
        self.node_state: Announcement | None = None
        self.latest: SignedManifest | None = None
        self.promised: list[SignedManifest] = []
        self.generation = 0
        self.fetched: list[Digest] = []
        self.offers: dict[Digest, list[bytes]] = {}
        self.reply: Callable[[], bytes] = self.announcement
        credentials = grpc.ssl_channel_credentials(
            self.node.pem, self.identity.tls_key_pem, self.identity.certificate.pem
        )
        options = (
            ("grpc.ssl_target_name_override", self.node.name),
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_send_message_length", -1),
        )
        self.channel = grpc.aio.secure_channel(self.node_address, credentials, options=options)
        self._server = grpc.aio.server(
            options=(("grpc.so_reuseport", 0), ("grpc.max_send_message_length", -1))
        )

    async def __aenter__(self) -> Member:
        methods = {
            "Hello": grpc.unary_unary_rpc_method_handler(self.answer_hello),
            "Announce": grpc.unary_unary_rpc_method_handler(self.answer_announce),
            "Fetch": grpc.unary_stream_rpc_method_handler(self.answer_fetch),
        }
        handler = grpc.method_handlers_generic_handler(PACKAGE.strip("/"), methods)
        self._server.add_generic_rpc_handlers((handler,))
        keys = [(self.identity.tls_key_pem, self.identity.certificate.pem)]
        credentials = grpc.ssl_server_credentials(keys, self.node.pem, require_client_auth=True)
        self._server.add_secure_port(self.address, credentials)
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self._server.stop(None)

    # -- Calls of the node ------------------------------------------------------------------------

    async def answer_hello(self, request: bytes, context: Any) -> bytes:
        self.node_greeting = messages.hello_from(pb.Greeting.FromString(request))
        return request  # the node's own values

    async def answer_announce(self, request: bytes, context: Any) -> bytes:
        self.node_state = messages.announcement_from(pb.Announcement.FromString(request))
        return self.reply()

    async def answer_fetch(self, request: bytes, context: Any) -> None:
        digest, _, _ = messages.fetch_from(pb.FetchRequest.FromString(request))
        self.fetched.append(digest)
        for piece in self.offers.get(digest, ()):
            await context.write(piece)

    # -- Our calls and answers --------------------------------------------------------------------

    async def meet(self) -> None:
        """Wait for the node's greeting and its first announcement."""
        while self.node_greeting is None or self.node_state is None:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.05)

    def announcement(self) -> bytes:
        """Our state, serialized, as the answer to a heartbeat."""
        state = Announcement(self.stamp, Round(0), "collecting", self.latest)
        return bytes(messages.announcement_to(state).SerializeToString())

    @property
    def stamp(self) -> int:
        return self.node_state.lamport + 1 if self.node_state else 1

    def manifest(self, weights: Weights) -> Manifest:
        """The manifest of an update that the node will fetch if it is valid."""
        assert self.node_greeting is not None
        assert self.node_state is not None
        before = self.promised[-1].manifest.update if self.promised else None
        round = self.node_state.round + AHEAD
        if before is not None and before.generation == self.generation:
            round = max(round, before.round + 1)
        update = Update(
            self.identity.name,
            Generation(self.generation),
            Round(round),
            tree_digest(len(weights.content), weights.hashes),
        )
        schema, raw_bytes = Digest(self.node_greeting.schema), len(weights.content)
        return Manifest(self.node_greeting.federation, update, self.stamp, schema, raw_bytes, 1)

    def promise(self, weights: Weights, **changed: Any) -> SignedManifest:
        """Sign an update with these weights, and announce it from the next heartbeat on."""
        return self.announce(replace(self.manifest(weights), **changed))

    def announce(self, manifest: Manifest) -> SignedManifest:
        """Sign any manifest, and announce it from the next heartbeat on."""
        self.latest = self.identity.sign_manifest(manifest)
        self.promised.append(self.latest)
        self.reply = self.announcement
        return self.latest

    def serve(self, weights: Weights, pieces: list[bytes] | None = None) -> SignedManifest:
        """Announce these weights, and send these pieces when they are fetched."""
        signed = self.promise(weights)
        offered = weights.pieces() if pieces is None else pieces
        self.offers[signed.manifest.update.digest] = offered
        return signed

    async def call(self, method: str, request: bytes) -> grpc.StatusCode:
        """Call the node; returns the status."""
        call = self.channel.unary_unary(PACKAGE + method)(request, timeout=20)
        return await call.code()

    def stream(self, method: str) -> Any:
        """Open a call without sending a request."""
        return self.channel.stream_stream(PACKAGE + method)()

    # -- Weights ----------------------------------------------------------------------------------

    def weights(self) -> Weights:
        """The node's newest update, as a valid header and valid values."""
        while True:
            found = [
                path
                for path in (self.node_home / "state" / "updates").iterdir()
                if re.fullmatch(r"[0-9a-f]{64}", path.name)
            ]
            try:
                content = max(found, key=lambda path: path.stat().st_mtime).read_bytes()
            except FileNotFoundError:  # the node has deleted it meanwhile
                continue
            length = 8 + int.from_bytes(content[:8], "little")
            return Weights(ChunkGrid(content[:length]), content)
