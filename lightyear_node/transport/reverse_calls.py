"""Calls to a site that has no port, over streams that the site opens.

The site keeps idle streams (the RPC `Lend`) open to every peer and waits: `serve_reverse_calls`.  A
peer that wants to call it takes one of them, sends its request and reads the answer as if it had
opened the connection: `ReverseChannel`.  A stream carries one call; then the site opens the next.

The calls are answered by the same handlers as those to a port.  TLS has authenticated both sides
when the site opened its connection.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc.aio
from google.protobuf.message import DecodeError
from grpc import StatusCode

from lightyear_node.transport import limits
from lightyear_node.transport.channel import Call, ChannelFailed, DirectChannel, uninterrupted
from lightyear_node.transport.handlers import Denied, Handlers
from lightyear_node.transport.messages import Malformed, Message
from lightyear_node.transport.rate_limits import RequestKind
from lightyear_node.types import PeerName
from lightyear_node.v1 import exchange_pb2 as pb

_CODES = {code.value[0]: code for code in StatusCode}

# -- The side that calls --------------------------------------------------------------------------


class ReverseStream:
    """One stream of a peer, and one call over it.  Only `run` uses gRPC."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._request: asyncio.Future[Message] = loop.create_future()
        self._answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(limits.REVERSE_ANSWERS_AHEAD)
        self._running: asyncio.Task[None] | None = None
        self._cancelled = False

    async def run(self, context: Any) -> None:
        """Runs while the stream is open: idle at first, then with one call."""
        self._running = asyncio.current_task()
        try:
            request = await self._request
            await context.write(request.SerializeToString())
            while True:
                await self._room.acquire()
                answer = await uninterrupted(context.read())
                if answer is grpc.aio.EOF:
                    return
                self._answers.put_nowait(bytes(answer))
        except asyncio.CancelledError:
            if not self._cancelled:
                raise  # the peer has disconnected
            if self._running is not None:
                self._running.uncancel()
            await context.abort(StatusCode.CANCELLED, "no longer wanted")
        finally:
            self._answers.put_nowait(None)

    def send(self, request: Message) -> None:
        self._request.set_result(request)

    async def read(self) -> Message | None:
        """The next answer, or None at the end of the stream."""
        answer = await self._answers.get()
        self._room.release()
        if answer is None:
            self._answers.put_nowait(None)
            return None
        parsed = pb.Answer.FromString(answer)
        if parsed.WhichOneof("answer") == "refusal":
            code = _CODES.get(parsed.refusal.code, StatusCode.UNKNOWN)
            raise ChannelFailed(code, parsed.refusal.details)
        return parsed

    def cancel(self) -> None:
        """End the call, and the stream with it."""
        self._cancelled = True
        if self._running is not None and not self._running.done():
            self._running.cancel()


class ReverseStreams:
    """The idle streams that peers have opened to us, by peer."""

    def __init__(self) -> None:
        self._idle: dict[PeerName, deque[ReverseStream]] = {}
        self._opened = asyncio.Condition()

    async def run(self, peer: PeerName, context: Any) -> None:
        """Offer a peer's new stream for a call; returns when the stream has ended."""
        stream = ReverseStream()
        idle = self._idle.setdefault(peer, deque())
        idle.append(stream)
        async with self._opened:
            self._opened.notify_all()
        try:
            await stream.run(context)
        finally:
            if stream in idle:
                idle.remove(stream)

    async def take(self, peer: PeerName) -> ReverseStream:
        """An idle stream of this peer; waits for one if there is none."""
        try:
            async with asyncio.timeout(limits.REVERSE_STREAM_WAIT_S), self._opened:
                await self._opened.wait_for(lambda: self._idle.get(peer))
                return self._idle[peer].popleft()
        except TimeoutError:
            raise ChannelFailed(StatusCode.UNAVAILABLE, "it has not called us lately") from None

    def close(self) -> None:
        for idle in self._idle.values():
            for stream in idle:
                stream.cancel()


@dataclass(eq=False, repr=False)
class ReverseChannel:
    """The `PeerChannel` to a peer without an address."""

    _peer: PeerName
    _streams: ReverseStreams
    address: str = field(init=False, default="the stream that it opens to us")

    async def hello(self, greeting: Message) -> Message:
        return (await self._call(pb.Question(hello=greeting), "hello")).hello

    async def announce(self, announcement: Message) -> Message:
        return (await self._call(pb.Question(announce=announcement), "announce")).announce

    def fetch(self, request: Message) -> _ReverseFetch:
        return _ReverseFetch(self._peer, self._streams, request)

    async def close(self) -> None:
        """Does nothing: the peer closes its streams."""

    async def _call(self, request: Message, kind: str) -> Message:
        stream = await self._streams.take(self._peer)
        try:
            async with asyncio.timeout(limits.CALL_S):
                stream.send(request)
                answer = await stream.read()
        except TimeoutError:
            raise ChannelFailed(StatusCode.DEADLINE_EXCEEDED, "") from None
        finally:
            stream.cancel()
        if answer is None:
            raise ChannelFailed(StatusCode.UNAVAILABLE, "the stream broke")
        if answer.WhichOneof("answer") != kind:
            raise Malformed("an answer to another question")
        return answer


@dataclass(eq=False, repr=False)
class _ReverseFetch:
    """A fetch over a reverse stream, which is taken when the first piece is read."""

    _peer: PeerName
    _streams: ReverseStreams
    _request: Message
    _stream: ReverseStream | None = field(init=False, default=None)

    async def read(self) -> Message | None:
        if self._stream is None:
            self._stream = await self._streams.take(self._peer)
            self._stream.send(pb.Question(fetch=self._request))
        answer = await self._stream.read()
        if answer is None:
            return None
        if answer.WhichOneof("answer") != "piece":
            raise Malformed("an answer to another question")
        return answer.piece

    def cancel(self) -> None:
        if self._stream is not None:
            self._stream.cancel()


# -- The side that is called: a site without a port -----------------------------------------------


async def serve_reverse_calls(
    peer: PeerName, current_channel: Callable[[], DirectChannel | None], handlers: Handlers
) -> NoReturn:
    """Keep one idle stream open to a peer, and answer the calls that it makes.

    `current_channel` returns the connection to the peer at this moment, if there is one.
    """
    backoff_s = limits.FETCH_BACKOFF_S
    while True:
        backoff_s = await _serve_or_back_off(peer, current_channel(), handlers, backoff_s)


async def _serve_or_back_off(
    peer: PeerName, channel: DirectChannel | None, handlers: Handlers, backoff_s: float
) -> float:
    """Returns the backoff after the next failure."""
    try:
        if channel is not None and await _serve_one(peer, channel, handlers):
            return limits.FETCH_BACKOFF_S
    except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError, TimeoutError):
        pass  # disconnected, or the peer refuses the stream; the heartbeat reports both
    except asyncio.CancelledError:
        # When a channel is closed, gRPC ends its calls as if their caller had been cancelled.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
    await asyncio.sleep(random.uniform(0, backoff_s))
    return min(2 * backoff_s, limits.REVERSE_BACKOFF_S_MAX)


async def _serve_one(peer: PeerName, channel: DirectChannel, handlers: Handlers) -> bool:
    """Wait for a request and answer it; False if the stream ended without one."""
    call = channel.open_reverse_stream()
    try:
        request = await call.read()
        if request is grpc.aio.EOF:
            return False
        await _answer(peer, request, call, handlers)
        await call.done_writing()
        # The peer ends the call when it has read enough.
        async with asyncio.timeout(limits.CHUNK_WRITE_S):
            await call.code()
        return True
    finally:
        call.cancel()


async def _answer(peer: PeerName, request: bytes, call: Call, handlers: Handlers) -> None:
    question = _parsed(request)
    kind = question.WhichOneof("question")

    async def reply(answer: Message) -> None:
        try:
            await call.write(answer.SerializeToString())
        except asyncio.InvalidStateError:  # how gRPC says that the peer has ended the call
            raise grpc.aio.UsageError("the call has ended") from None

    async def send(piece: Message) -> None:
        await reply(pb.Answer(piece=piece))

    try:
        with handlers.call(peer, RequestKind(kind) if kind else RequestKind.HELLO):
            match kind:
                case "hello":
                    hello = await handlers.hello(peer, question.hello.SerializeToString())
                    await reply(pb.Answer(hello=hello))
                case "announce":
                    state = await handlers.announce(peer, question.announce.SerializeToString())
                    await reply(pb.Answer(announce=state))
                case "fetch":
                    await handlers.fetch(peer, question.fetch.SerializeToString(), send)
                case _:
                    raise Malformed("unknown question")
    except Denied as denied:
        refusal = pb.Refusal(code=denied.code.value[0], details=denied.details)
        async with asyncio.timeout(limits.REFUSAL_WRITE_S):
            await reply(pb.Answer(refusal=refusal))


def _parsed(request: bytes) -> Message:
    """Unparsable bytes become an empty question, which is refused as malformed."""
    try:
        return pb.Question.FromString(request)
    except DecodeError:
        return pb.Question()
