"""The side that is called: our own port.

Owns TLS, who may call, and the border between gRPC's streams and the service's answers.  Deny by
default: TLS admits only pinned certificates, and every single call is looked up again, because a
withdrawn pin does not end a connection that is already open; such connections are cut.

All calls are handled as streams, which on the wire they are: so a caller is known, counted and
given a deadline before the first byte of its request has come.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc import StatusCode

from lightyear_node.errors import ConfigError
from lightyear_node.identity import Certificate, Identity, fingerprint
from lightyear_node.records import Fingerprint, PeerName
from lightyear_node.transport import limits
from lightyear_node.transport.borrowing import LentLines
from lightyear_node.transport.doorway import Doorway
from lightyear_node.transport.gate import Ask
from lightyear_node.transport.hanging_up import hang_up
from lightyear_node.transport.messages import Malformed, Message
from lightyear_node.transport.service import Denied, Host, Service
from lightyear_node.v1 import exchange_pb2 as pb

Pins = Mapping[PeerName, Sequence[Certificate]]
"""Who may call, by which certificates; two for a peer that is renewing its own."""
Context = Any
"""gRPC's context of one call; its type parameters would be generated messages."""

CONNECTIONS_KEPT = 1024
"""Whose connections are remembered, to cut them; a federation has at most a few per peer."""


class ExchangeServer:
    """Listens for the peers; to be made and used within one event loop."""

    def __init__(self, identity: Identity, pins: Pins, service: Service, host: Host) -> None:
        self.lent = LentLines()
        self._host = host
        self._doorway = Doorway(limits.HANDSHAKE_S)
        self._calls = _Calls(service, host, self._doorway, self.lent)
        self._server: grpc.aio.Server | None = None
        self._renewed = False
        self._renewing = threading.Lock()
        if not any(pins.values()):
            raise ConfigError("there is no peer whose certificate could be accepted")
        self.admit(identity, pins)

    def admit(self, identity: Identity, pins: Pins) -> None:
        """Who we are and who may call, from the next handshake on.

        Whoever is no longer among them loses its connections at once.
        """
        certificates = [certificate for pinned in pins.values() for certificate in pinned]
        # gRPC takes no roots to mean every public authority.  When everybody has been removed,
        # TLS lets nobody in but ourselves, and we are nobody whose call is answered.
        roots = b"".join(certificate.pem for certificate in certificates)
        self._identity, self._roots = identity, roots or identity.certificate.pem
        with self._renewing:
            self._renewed = True
        self._calls.admit(pins)

    async def start(self, listen: str) -> int:
        """Bind and answer; returns the port, for who asked for port 0."""
        server = grpc.aio.server(
            options=limits.SERVER_OPTIONS, maximum_concurrent_rpcs=limits.CALLS_MAX
        )
        server.add_generic_rpc_handlers((self._calls.handlers(),))
        self._renewed = False  # nobody knocks yet, and what is true now is given here
        credentials = grpc.dynamic_ssl_server_credentials(
            self._tls(),
            self._knocked,  # type: ignore[arg-type]  # None is documented, but not in the stubs
            require_client_authentication=True,
        )
        try:
            port = server.add_secure_port(listen, credentials)
        except RuntimeError:
            raise ConfigError(
                f"cannot listen on {listen}: the port is in use, or the address is not ours",
                hint="is another node running here?",
            ) from None
        await server.start()
        self._server = server
        return port

    async def stop(self) -> None:
        self.lent.close()
        if self._server is not None:
            await self._server.stop(limits.STOP_S)

    def report_strangers(self) -> None:
        """Tell the host of every connection that never became a peer's; to be called often."""
        for _ in range(self._doorway.turned_away(time.monotonic())):
            self._host.denied("handshake", None)

    def _knocked(self) -> grpc.ServerCertificateConfiguration | None:
        """Asked at every handshake, so that new pins and keys need no restart; None: as before.

        gRPC builds anew whatever it is given here, under handshakes that are still using the last:
        a crowd of them has ended the process, and takes a quarter of a megabyte each.
        """
        self._doorway.knock(time.monotonic())
        with self._renewing:
            renewed, self._renewed = self._renewed, False
        return self._tls() if renewed else None

    def _tls(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(self._identity.tls_key_pem, self._identity.certificate.pem)],
            root_certificates=self._roots,
        )


class _Calls:
    """The service's methods, by the names that exchange.proto gives them."""

    def __init__(self, service: Service, host: Host, doorway: Doorway, lent: LentLines) -> None:
        self._service = service
        self._host = host
        self._doorway = doorway
        self._lent = lent
        self._peers: dict[Fingerprint, PeerName] = {}
        self._connections: OrderedDict[str, Fingerprint] = OrderedDict()

    def handlers(self) -> grpc.GenericRpcHandler:
        service = pb.DESCRIPTOR.services_by_name["Exchange"]
        methods = {
            "Hello": self._answering(Ask.HELLO, self._service.hello),
            "Announce": self._answering(Ask.ANNOUNCE, self._service.announce),
            "Fetch": self._fetch,
            "Lend": self._lend,
        }
        return grpc.method_handlers_generic_handler(
            service.full_name,
            {
                name: grpc.stream_stream_rpc_method_handler(method)
                for name, method in methods.items()
            },
        )

    def admit(self, pins: Pins) -> None:
        self._peers = {
            certificate.fingerprint: peer for peer, pinned in pins.items() for certificate in pinned
        }
        self._service.gate.keep(pins)
        withdrawn = {name for name, pin in self._connections.items() if pin not in self._peers}
        for connection in withdrawn:
            del self._connections[connection]
        hang_up(withdrawn)

    def _answering(
        self, ask: Ask, answer: Callable[[PeerName, bytes], Awaitable[Message]]
    ) -> Callable[[Any, Context], Awaitable[None]]:
        async def handle(_: Any, context: Context) -> None:
            async with self._call(ask, context) as peer:
                reply = await answer(peer, await _request(context))
                await context.write(reply.SerializeToString())

        return handle

    async def _fetch(self, _: Any, context: Context) -> None:
        async with self._call(Ask.FETCH, context) as peer:

            async def send(piece: Message) -> None:
                await context.write(piece.SerializeToString())

            await self._service.fetch(peer, await _request(context), send)

    async def _lend(self, _: Any, context: Context) -> None:
        async with self._call(Ask.LEND, context) as peer:
            await self._lent.lend(peer, context)

    @contextlib.asynccontextmanager
    async def _call(self, ask: Ask, context: Context) -> AsyncIterator[PeerName]:
        """Every call runs inside this: who calls, and how a refusal reaches the caller."""
        peer = await self._caller(context)
        try:
            with self._service.call(peer, ask):
                yield peer
        except Denied as denied:
            # The status waits in line behind a chunk that a stalled reader does not take; and its
            # connection may just have been ended for another of its calls.
            with contextlib.suppress(TimeoutError, grpc.aio.InternalError):
                async with asyncio.timeout(limits.GIVE_UP_S):
                    await context.abort(denied.code, denied.details)
            hang_up({context.peer()})
            raise asyncio.CancelledError from None  # nobody is left to hear of it
        except (grpc.aio.UsageError, grpc.aio.InternalError):
            # The peer hung up in the middle of an answer, which gRPC would log as our failure.
            raise asyncio.CancelledError from None

    async def _caller(self, context: Context) -> PeerName:
        """The pinned peer on the line; for anybody else the call ends here."""
        tls = context.auth_context()
        pem = next(iter(tls.get("x509_pem_cert", ())), b"")
        certificate = _fingerprint_of(pem) if pem else None
        peer = self._peers.get(certificate) if certificate else None
        self._doorway.enter(context.peer())  # who is refused here is counted here
        if certificate is None or peer is None:
            await self._deny(context, "unknown_peer", None)
        # Newer gRPC tells the version; its own clients always speak 1.3.
        if next(iter(tls.get("ssl_tls_version", ())), b"TLSv1.3") != b"TLSv1.3":
            await self._deny(context, "old_tls", peer)
        self._note_connection(context.peer(), certificate)
        return peer

    def _note_connection(self, connection: str, certificate: Fingerprint) -> None:
        """The longest without a call come first, and are ended if their peer has too many."""
        known = connection in self._connections
        self._connections[connection] = certificate
        self._connections.move_to_end(connection)
        if len(self._connections) > CONNECTIONS_KEPT:
            self._connections.popitem(last=False)
        if not known:
            same = [name for name, pin in self._connections.items() if pin == certificate]
            idlest = set(same[: -limits.CONNECTIONS_PER_PEER_MAX])
            for name in idlest:
                del self._connections[name]
            hang_up(idlest)

    async def _deny(self, context: Context, reason: str, peer: PeerName | None) -> NoReturn:
        self._host.denied(reason, peer)
        await context.abort(StatusCode.PERMISSION_DENIED, reason)
        raise AssertionError("abort always raises")


async def _request(context: Context) -> bytes:
    """The one message of a request, which is small, and does not drip in."""
    try:
        async with asyncio.timeout(limits.ASK_S):
            request = await context.read()
    except TimeoutError:
        raise Malformed(f"no request came within {limits.ASK_S:.0f} s") from None
    if request is grpc.aio.EOF:
        raise Malformed("no request came")
    return bytes(request)


@lru_cache(maxsize=256)
def _fingerprint_of(pem: bytes) -> Fingerprint:
    return fingerprint(ssl.PEM_cert_to_DER_cert(pem.decode()))
