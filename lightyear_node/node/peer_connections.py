"""Connections to all peers, and our own port: opened, replaced and closed together.

Decides how each peer is called: directly, or by reverse calls over a stream that a peer without an
address has opened.  A site without an address opens such streams itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from lightyear_node.node.config_changes import ConfigChanges
from lightyear_node.node.home import Home
from lightyear_node.transport import limits
from lightyear_node.transport.channel import DirectChannel
from lightyear_node.transport.client import PeerClient
from lightyear_node.transport.handlers import Handlers, Host
from lightyear_node.transport.reverse_calls import (
    ReverseChannel,
    ReverseStreams,
    serve_reverse_calls,
)
from lightyear_node.transport.server import ExchangeServer
from lightyear_node.types import PeerName

Spawn = Callable[[Coroutine[Any, Any, Any]], None]
"""Starts a background task that the node owns."""


class PeerConnections:
    """To be made and used within one event loop."""

    def __init__(
        self, home: Home, host: Host, scratch: Path, faulty_max: int, spawn: Spawn
    ) -> None:
        self._home = home
        self._spawn = spawn
        self._handlers = Handlers(host, scratch, faulty_max)
        # A site that trains alone, or that cannot be reached, does not listen.
        self._server: ExchangeServer | None = None
        if home.pins and home.listen is not None:
            self._server = ExchangeServer(home.identity, home.pins, self._handlers, host)
        # One slot more per possibly faulty peer: slow senders must not block the others.
        self.fetch_slots = asyncio.Semaphore(limits.FETCHES_ISSUED_MAX + faulty_max)
        self.clients = {peer: self._client(peer) for peer in home.others}
        self._reverse_peers: set[PeerName] = set()

    async def open(self) -> str | None:
        """Start to listen; returns the address, or None for a site without a port."""
        listen = self._home.listen
        if self._server is not None and listen is not None:
            await self._server.start(listen)
        self._open_reverse_streams()
        return listen if self._server is not None else None

    def replace(self, home: Home, changes: ConfigChanges) -> None:
        """Switch to other certificates, addresses or peers.

        Connections that are no longer trusted are closed at once; others may finish their calls.
        """
        before = self._home.others
        self._home = home
        if self._server is not None:
            self._server.set_credentials(home.identity, home.pins)
        for peer in {*before, *home.others} if changes.renewed else changes.affected():
            old = self.clients.pop(peer, None)
            if peer in home.others:
                self.clients[peer] = self._client(peer)
            if old is not None:
                self._spawn(old.close(0.0 if peer in changes.distrusted() else limits.RETIRE_S))
        self._open_reverse_streams()

    def shed(self) -> None:
        """Delete cached files that only save work."""
        self._handlers.free_disk_space()

    def report_strangers(self) -> None:
        if self._server is not None:
            self._server.report_strangers()

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop()
        for client in self.clients.values():
            await client.close()
        self._handlers.close()

    def _open_reverse_streams(self) -> None:
        """Open streams for reverse calls to every peer, if this site has no address."""
        if self._home.address_of(self._home.us) is not None:
            return
        for peer in set(self._home.others) - self._reverse_peers:
            self._reverse_peers.add(peer)
            for _ in range(limits.REVERSE_STREAMS_IDLE):
                self._spawn(
                    serve_reverse_calls(peer, partial(self._direct_channel, peer), self._handlers)
                )

    def _client(self, peer: PeerName) -> PeerClient:
        home = self._home
        address = home.address_of(peer)
        if address is None:
            server = self._server
            streams = server.reverse_streams if server is not None else ReverseStreams()
            return PeerClient(peer, ReverseChannel(peer, streams))
        return PeerClient(
            peer, DirectChannel(peer, address, home.certificates[peer], home.identity)
        )

    def _direct_channel(self, peer: PeerName) -> DirectChannel | None:
        """The direct channel to a peer; None if it was removed or has no address either."""
        client = self.clients.get(peer)
        return (
            client.channel
            if client is not None and isinstance(client.channel, DirectChannel)
            else None
        )
