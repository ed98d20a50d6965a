"""The gRPC server at our port.

Owns TLS, authentication, and the adapter between gRPC's streams and the handlers.  Deny by
default: TLS admits only pinned certificates, and every call is checked again, because withdrawing a
pin does not end a connection that is already open; such connections are closed.

All calls are handled as streams, as they are on the wire, so that a caller is authenticated,
counted and given a deadline before the first byte of its request is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc import StatusCode

from lightyear_node.errors import ConfigError
from lightyear_node.identity.keys import Certificate, Identity, fingerprint
from lightyear_node.storage import file_descriptors
from lightyear_node.storage.file_descriptors import ConnectionShare
from lightyear_node.transport import limits
from lightyear_node.transport.handlers import Denied, Handlers, Host
from lightyear_node.transport.handshake_counter import HandshakeCounter
from lightyear_node.transport.messages import Malformed, Message
from lightyear_node.transport.rate_limits import RequestKind
from lightyear_node.transport.reverse_calls import ReverseStreams
from lightyear_node.transport.sockets import close_connections
from lightyear_node.transport.stranger_limits import StrangerLimits
from lightyear_node.types import Fingerprint, PeerName
from lightyear_node.v1 import exchange_pb2 as pb

Pins = Mapping[PeerName, Sequence[Certificate]]
"""The accepted certificates of each peer; two while a peer renews its own."""
Context = Any
"""gRPC's context of a call; its type parameters would be generated messages."""


class ExchangeServer:
    """Accepts the calls of peers; to be made and used within one event loop."""

    def __init__(self, identity: Identity, pins: Pins, handlers: Handlers, host: Host) -> None:
        self.reverse_streams = ReverseStreams()
        self._host = host
        self.handshakes = HandshakeCounter(limits.HANDSHAKE_S)
        self._strangers = StrangerLimits()
        self._calls = AuthenticatedCalls(
            handlers, host, self.handshakes, self._strangers, self.reverse_streams
        )
        self._server: grpc.aio.Server | None = None
        self._tls_changed = False
        self._tls_lock = threading.Lock()
        if not any(pins.values()):
            raise ConfigError("there is no peer whose certificate could be accepted")
        self.set_credentials(identity, pins)

    def set_credentials(self, identity: Identity, pins: Pins) -> None:
        """Use this identity and accept these peers from the next handshake on.

        The connections of peers that are no longer accepted are closed at once.
        """
        certificates = [certificate for pinned in pins.values() for certificate in pinned]
        # Without roots, gRPC would trust every public certificate authority.  When no peer is left,
        # TLS accepts our own certificate only, and a call with that is refused.
        roots = b"".join(certificate.pem for certificate in certificates)
        self._identity, self._roots = identity, roots or identity.certificate.pem
        with self._tls_lock:
            self._tls_changed = True
        self._share = ConnectionShare.of(file_descriptors.limit(), len(pins))
        self._strangers.set_limits(self._share, len(pins))
        self._calls.set_pins(pins)

    async def start(self, listen: str) -> int:
        """Bind and accept calls; returns the port, which differs from `listen` if that is 0."""
        server = grpc.aio.server(
            # gRPC closes further connections at once.
            options=(
                *limits.SERVER_OPTIONS,
                ("grpc.max_allowed_incoming_connections", self._share.connections),
            ),
            maximum_concurrent_rpcs=limits.CALLS_MAX,
        )
        server.add_generic_rpc_handlers((self._calls.rpc_handlers(),))
        self._tls_changed = False  # no handshake yet, and gRPC gets the current credentials here
        credentials = grpc.dynamic_ssl_server_credentials(
            self._tls(),
            self.handshake_started,  # type: ignore[arg-type]  # None is documented, but not in the stubs
            require_client_authentication=True,
        )
        try:
            port = server.add_secure_port(listen, credentials)
        except RuntimeError:
            raise ConfigError(
                f"cannot listen on {listen}: the port is in use, or the address is not ours",
                hint="is another node running here?",
            ) from None
        self._strangers.set_port(port)
        await server.start()
        self._server = server
        return port

    async def stop(self) -> None:
        self.reverse_streams.close()
        if self._server is not None:
            await self._server.stop(limits.STOP_S)

    def report_strangers(self) -> None:
        """Close excess unauthenticated connections, and report failed ones to the host.

        To be called several times per second.
        """
        self._strangers.enforce()
        self._host.strangers_closed(self._strangers.take_closed())
        for _ in range(self.handshakes.take_failed(time.monotonic())):
            self._host.denied("handshake", None)

    def handshake_started(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC at every handshake; returns new credentials, or None if unchanged.

        Unchanged credentials are not returned again: gRPC would rebuild its TLS context, 256 KiB
        each, while other handshakes use the last one; a flood of them has crashed the process.
        """
        self.handshakes.handshake_started(time.monotonic())
        self._strangers.connection_opened()
        with self._tls_lock:
            changed, self._tls_changed = self._tls_changed, False
        return self._tls() if changed else None

    def _tls(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(self._identity.tls_key_pem, self._identity.certificate.pem)],
            root_certificates=self._roots,
        )


@dataclass(eq=False, repr=False)
class AuthenticatedCalls:
    """The RPCs of exchange.proto: authenticates each call and passes it to the handlers."""

    _handlers: Handlers
    _host: Host
    _handshakes: HandshakeCounter
    _strangers: StrangerLimits
    _reverse_streams: ReverseStreams
    _peers: dict[Fingerprint, PeerName] = field(init=False, default_factory=dict)
    _connections: OrderedDict[str, Fingerprint] = field(init=False, default_factory=OrderedDict)

    def rpc_handlers(self) -> grpc.GenericRpcHandler:
        service = pb.DESCRIPTOR.services_by_name["Exchange"]
        methods = {
            "Hello": self._unary(RequestKind.HELLO, self._handlers.hello),
            "Announce": self._unary(RequestKind.ANNOUNCE, self._handlers.announce),
            "Fetch": self._fetch,
            "Lend": self._reverse_stream,
        }
        return grpc.method_handlers_generic_handler(
            service.full_name,
            {
                name: grpc.stream_stream_rpc_method_handler(method)
                for name, method in methods.items()
            },
        )

    def set_pins(self, pins: Pins) -> None:
        self._peers = {
            certificate.fingerprint: peer for peer, pinned in pins.items() for certificate in pinned
        }
        self._handlers.rate_limits.forget_all_but(pins)
        withdrawn = {name for name, pin in self._connections.items() if pin not in self._peers}
        for connection in withdrawn:
            del self._connections[connection]
        self._strangers.forget(withdrawn)
        close_connections(withdrawn)

    def _unary(
        self, kind: RequestKind, answer: Callable[[PeerName, bytes], Awaitable[Message]]
    ) -> Callable[[Any, Context], Awaitable[None]]:
        async def handle(_: Any, context: Context) -> None:
            async with self._call(kind, context) as peer:
                reply = await answer(peer, await _request(context))
                await context.write(reply.SerializeToString())

        return handle

    async def _fetch(self, _: Any, context: Context) -> None:
        async with self._call(RequestKind.FETCH, context) as peer:

            async def send(piece: Message) -> None:
                await context.write(piece.SerializeToString())

            await self._handlers.fetch(peer, await _request(context), send)

    async def _reverse_stream(self, _: Any, context: Context) -> None:
        async with self._call(RequestKind.REVERSE_STREAM, context) as peer:
            await self._reverse_streams.run(peer, context)

    @contextlib.asynccontextmanager
    async def _call(self, kind: RequestKind, context: Context) -> AsyncIterator[PeerName]:
        """Runs every call: yields the authenticated caller, and sends refusals to it."""
        peer = await self._authenticate(context)
        try:
            with self._handlers.call(peer, kind):
                yield peer
        except Denied as denied:
            # The status is queued behind a chunk that a stalled reader does not read; and another
            # call may just have closed the connection.
            with contextlib.suppress(TimeoutError, grpc.aio.InternalError):
                async with asyncio.timeout(limits.REFUSAL_WRITE_S):
                    await context.abort(denied.code, denied.details)
            close_connections({context.peer()})
            raise asyncio.CancelledError from None  # the caller is disconnected
        except (grpc.aio.UsageError, grpc.aio.InternalError):
            # The peer has disconnected during the answer, which gRPC would log as our failure.
            raise asyncio.CancelledError from None

    async def _authenticate(self, context: Context) -> PeerName:
        """The peer whose pinned certificate the caller has shown; other callers are refused."""
        tls = context.auth_context()
        pem = next(iter(tls.get("x509_pem_cert", ())), b"")
        certificate = _fingerprint_of(pem) if pem else None
        peer = self._peers.get(certificate) if certificate else None
        self._handshakes.call_received(context.peer())  # a refusal is counted separately, below
        if certificate is None or peer is None:
            await self._deny(context, "unknown_peer", None)
        # Newer gRPC reports the version; its own clients always use 1.3.
        if next(iter(tls.get("ssl_tls_version", ())), b"TLSv1.3") != b"TLSv1.3":
            await self._deny(context, "old_tls", peer)
        self._record_connection(context.peer(), certificate)
        return peer

    def _record_connection(self, connection: str, certificate: Fingerprint) -> None:
        """Keep connections ordered by their last call; close the longest idle of too many."""
        known = connection in self._connections
        self._strangers.call_received(connection)
        self._connections[connection] = certificate
        self._connections.move_to_end(connection)
        if len(self._connections) > limits.CONNECTIONS_KEPT:
            self._connections.popitem(last=False)
        if not known:
            same = [name for name, pin in self._connections.items() if pin == certificate]
            excess = set(same[: -limits.CONNECTIONS_PER_PEER_MAX])
            for name in excess:
                del self._connections[name]
            self._strangers.forget(excess)
            close_connections(excess)

    async def _deny(self, context: Context, reason: str, peer: PeerName | None) -> NoReturn:
        self._host.denied(reason, peer)
        await context.abort(StatusCode.PERMISSION_DENIED, reason)
        raise AssertionError("abort always raises")


async def _request(context: Context) -> bytes:
    """Read the single message of a request, within a deadline."""
    try:
        async with asyncio.timeout(limits.REQUEST_READ_S):
            request = await context.read()
    except TimeoutError:
        raise Malformed(f"no request came within {limits.REQUEST_READ_S:.0f} s") from None
    if request is grpc.aio.EOF:
        raise Malformed("no request came")
    return bytes(request)


@lru_cache(maxsize=256)
def _fingerprint_of(pem: bytes) -> Fingerprint:
    return fingerprint(ssl.PEM_cert_to_DER_cert(pem.decode()))
