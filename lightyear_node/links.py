"""The lines to all peers, and our own port: opened, replaced and closed together.

Owns which kind of line leads to which peer: one that we open, or one that a site without an
address lends us; where it is ours that has none, the lines that we lend.  Must not know what is
said over them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from lightyear_node.home import Home
from lightyear_node.records import PeerName
from lightyear_node.reload import Changes
from lightyear_node.transport import limits
from lightyear_node.transport.borrowing import Borrowed, LentLines
from lightyear_node.transport.client import PeerClient
from lightyear_node.transport.lending import keep_lending
from lightyear_node.transport.lines import Direct
from lightyear_node.transport.server import ExchangeServer
from lightyear_node.transport.service import Host, Service

Spawn = Callable[[Coroutine[Any, Any, Any]], None]
"""Runs something beside the caller, as long as the node runs."""


class Links:
    """To be made and used within one event loop."""

    def __init__(self, home: Home, host: Host, scratch: Path, faulty_max: int) -> None:
        self._home = home
        self._service = Service(host, scratch, faulty_max)
        # A site that trains alone has nothing to say to anybody, and does not even listen; one
        # that cannot be reached has no port to listen on.
        self._server: ExchangeServer | None = None
        if home.pins and home.listen is not None:
            self._server = ExchangeServer(home.identity, home.pins, self._service, host)
        # Room for as many as may be faulty, lest those that send slowly keep the others waiting.
        self.fetch_slots = asyncio.Semaphore(limits.FETCHES_ISSUED_MAX + faulty_max)
        self.clients = {peer: self._client(peer) for peer in home.others}
        self._lending: set[PeerName] = set()

    async def open(self, spawn: Spawn) -> str | None:
        """Answer calls from now on; returns where, if anywhere."""
        listen = self._home.listen
        if self._server is not None and listen is not None:
            await self._server.start(listen)
        self._lend(spawn)
        return listen if self._server is not None else None

    def replace(self, home: Home, changes: Changes, spawn: Spawn) -> None:
        """Go on with other certificates, addresses or peers.

        A line that is no longer trusted is cut; any other may end what is running on it.
        """
        everybody = self._home.others
        self._home = home
        if self._server is not None:
            self._server.admit(home.identity, home.pins)
        for peer in {*everybody, *home.others} if changes.renewed else changes.affected():
            old = self.clients.pop(peer, None)
            if peer in home.others:
                self.clients[peer] = self._client(peer)
            if old is not None:
                spawn(old.close(0.0 if peer in changes.distrusted() else limits.RETIRE_S))
        self._lend(spawn)

    def shed(self) -> None:
        """Drop whatever on the disk only saves work."""
        self._service.shed()

    def report_strangers(self) -> None:
        if self._server is not None:
            self._server.report_strangers()

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop()
        for client in self.clients.values():
            await client.close()
        self._service.close()

    def _lend(self, spawn: Spawn) -> None:
        """Who cannot be called lends its lines to everybody; once begun, as long as we run."""
        if self._home.address_of(self._home.us) is not None:
            return
        for peer in set(self._home.others) - self._lending:
            self._lending.add(peer)
            for _ in range(limits.LENT_IDLE):
                spawn(keep_lending(peer, partial(self._line, peer), self._service))

    def _client(self, peer: PeerName) -> PeerClient:
        home = self._home
        address = home.address_of(peer)
        if address is None:
            lent = self._server.lent if self._server is not None else LentLines()
            return PeerClient(peer, Borrowed(peer, lent))
        return PeerClient(peer, Direct(peer, address, home.certificates[peer], home.identity))

    def _line(self, peer: PeerName) -> Direct | None:
        """The one in force; None while a peer is removed, or has no address either."""
        client = self.clients.get(peer)
        return client.line if client is not None and isinstance(client.line, Direct) else None
