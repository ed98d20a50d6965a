"""The connection to one peer: the interface that a client uses, and the direct implementation.

Owns the gRPC channel and its credentials.  The peer's pinned certificates are the only roots of its
connection, so that TLS refuses any other server, whatever the address resolves to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import grpc
import grpc.aio
from grpc import StatusCode

from lightyear_node.identity.keys import Certificate, Identity
from lightyear_node.transport import limits
from lightyear_node.transport.messages import Message
from lightyear_node.types import PeerName
from lightyear_node.v1 import exchange_pb2 as pb

Call = Any
"""gRPC's running stream of bytes.  Messages are parsed here: if gRPC did it, unparsable bytes would
become None, with a traceback in the log."""
_Method = Any
"""Opens such a call."""


class ChannelFailed(Exception):
    """A call failed with this gRPC status."""

    def __init__(self, code: StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class FetchStream(Protocol):
    """The pieces of one fetch."""

    async def read(self) -> Message | None:
        """The next piece, or None at the end."""

    def cancel(self) -> None: ...


class PeerChannel(Protocol):
    """What a `PeerClient` calls its peer through."""

    address: str
    """For error messages."""

    async def hello(self, greeting: Message) -> Message: ...

    async def announce(self, announcement: Message) -> Message: ...

    def fetch(self, request: Message) -> FetchStream: ...

    async def close(self) -> None: ...


class DirectChannel:
    """A connection that we open; to be made and used within one event loop."""

    def __init__(
        self,
        peer: PeerName,
        address: str,
        certificates: Sequence[Certificate],
        identity: Identity,
    ) -> None:
        if not certificates:
            # Without roots, gRPC would trust every public certificate authority.
            raise ValueError(f"{peer} has no pinned certificate")
        credentials = grpc.ssl_channel_credentials(
            root_certificates=b"".join(certificate.pem for certificate in certificates),
            private_key=identity.tls_key_pem,
            certificate_chain=identity.certificate.pem,
        )
        # The certificate names the site, not its address.
        options = (*limits.CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", peer))
        self.address = address
        self._channel = grpc.aio.secure_channel(address, credentials, options=options)
        self._hello: _Method = self._channel.unary_unary(_path("Hello"))
        self._announce: _Method = self._channel.unary_unary(_path("Announce"))
        self._fetch: _Method = self._channel.unary_stream(_path("Fetch"))
        self._reverse_stream: _Method = self._channel.stream_stream(_path("Lend"))

    async def hello(self, greeting: Message) -> Message:
        with grpc_errors_translated():
            reply = await self._hello(greeting.SerializeToString(), timeout=limits.CALL_S)
        return pb.Greeting.FromString(reply)

    async def announce(self, announcement: Message) -> Message:
        with grpc_errors_translated():
            reply = await self._announce(announcement.SerializeToString(), timeout=limits.CALL_S)
        return pb.Announcement.FromString(reply)

    def fetch(self, request: Message) -> FetchStream:
        return _DirectFetch(self._fetch(request.SerializeToString()))

    def open_reverse_stream(self) -> Call:
        """Open a stream over which the peer can make one call to us."""
        return self._reverse_stream()

    async def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        await self._channel.close()


class _DirectFetch:
    def __init__(self, call: Call) -> None:
        self._call = call

    async def read(self) -> Message | None:
        with grpc_errors_translated():
            piece = await uninterrupted(self._call.read())
        return None if piece is grpc.aio.EOF else pb.Piece.FromString(piece)

    def cancel(self) -> None:
        self._call.cancel()


def _path(name: str) -> str:
    return f"/{pb.DESCRIPTOR.services_by_name['Exchange'].full_name}/{name}"


@contextmanager
def grpc_errors_translated() -> Iterator[None]:
    """Raise gRPC's errors as `ChannelFailed`."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise ChannelFailed(error.code(), error.details() or "") from None


async def uninterrupted(read: Coroutine[Any, Any, Any]) -> Any:
    """Await one of gRPC's reads; if the caller is cancelled, the read runs on until its call ends.

    gRPC frees a message only when the read that receives it ends: a read that is cancelled while
    it waits leaks the next chunk, a megabyte each time.
    """
    reading = asyncio.get_running_loop().create_task(read)
    # Consume the result, so that asyncio does not log an exception that was never retrieved.
    reading.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return await asyncio.shield(reading)
