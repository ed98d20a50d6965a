"""The way to one peer: what a client needs of a connection, and the usual kind of it.

Owns the channel and its credentials.  The peer's pinned certificates are the only roots of its
connection, so that TLS itself refuses everybody else, whatever the address resolves to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import grpc
import grpc.aio
from grpc import StatusCode

from lightyear_node.identity import Certificate, Identity
from lightyear_node.records import PeerName
from lightyear_node.transport import limits
from lightyear_node.transport.messages import Message
from lightyear_node.v1 import exchange_pb2 as pb

Call = Any
"""gRPC's running stream of bytes, of which messages are made here: where gRPC does that, bytes that
are no message come out as None, and with a traceback in the log."""
_Method = Any
"""What opens such a call."""


class LineFailed(Exception):
    """A call did not succeed; gRPC's status says how."""

    def __init__(self, code: StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class Stream(Protocol):
    """The pieces of one fetch."""

    async def read(self) -> Message | None:
        """The next piece, or None at the end."""

    def cancel(self) -> None: ...


class Line(Protocol):
    address: str
    """For people."""

    async def hello(self, greeting: Message) -> Message: ...

    async def announce(self, announcement: Message) -> Message: ...

    def fetch(self, request: Message) -> Stream: ...

    async def close(self) -> None: ...


class Direct:
    """A connection that we open; to be made and used within one event loop."""

    def __init__(
        self,
        peer: PeerName,
        address: str,
        certificates: Sequence[Certificate],
        identity: Identity,
    ) -> None:
        if not certificates:
            # gRPC takes no roots to mean every public authority.
            raise ValueError(f"{peer} has no pinned certificate")
        credentials = grpc.ssl_channel_credentials(
            root_certificates=b"".join(certificate.pem for certificate in certificates),
            private_key=identity.tls_key_pem,
            certificate_chain=identity.certificate.pem,
        )
        # The certificate bears the site's name, not the address's.
        options = (*limits.CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", peer))
        self.address = address
        self._channel = grpc.aio.secure_channel(address, credentials, options=options)
        self._hello: _Method = self._channel.unary_unary(_path("Hello"))
        self._announce: _Method = self._channel.unary_unary(_path("Announce"))
        self._fetch: _Method = self._channel.unary_stream(_path("Fetch"))
        self._lend: _Method = self._channel.stream_stream(_path("Lend"))

    async def hello(self, greeting: Message) -> Message:
        with failing():
            reply = await self._hello(greeting.SerializeToString(), timeout=limits.CALL_S)
        return pb.Greeting.FromString(reply)

    async def announce(self, announcement: Message) -> Message:
        with failing():
            reply = await self._announce(announcement.SerializeToString(), timeout=limits.CALL_S)
        return pb.Announcement.FromString(reply)

    def fetch(self, request: Message) -> Stream:
        return _Pieces(self._fetch(request.SerializeToString()))

    def lend(self) -> Call:
        """A stream for one call in the other direction."""
        return self._lend()

    async def close(self) -> None:
        """Calls still running are cancelled."""
        await self._channel.close()


class _Pieces:
    def __init__(self, call: Call) -> None:
        self._call = call

    async def read(self) -> Message | None:
        with failing():
            piece = await unbroken(self._call.read())
        return None if piece is grpc.aio.EOF else pb.Piece.FromString(piece)

    def cancel(self) -> None:
        self._call.cancel()


def _path(name: str) -> str:
    return f"/{pb.DESCRIPTOR.services_by_name['Exchange'].full_name}/{name}"


@contextmanager
def failing() -> Iterator[None]:
    """gRPC's errors as ours."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise LineFailed(error.code(), error.details() or "") from None


async def unbroken(read: Coroutine[Any, Any, Any]) -> Any:
    """Await gRPC's read; if that is cancelled, the read itself goes on until its call ends.

    gRPC frees a message only at the end of the read that receives it: one that is cancelled while
    it waits leaks the next chunk, a megabyte each time.
    """
    reading = asyncio.get_running_loop().create_task(read)
    # How a read ends that nobody awaits any more is no news.
    reading.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return await asyncio.shield(reading)
