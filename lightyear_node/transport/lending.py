"""The other end of `borrowing`: a site that cannot be reached keeps lines open to be called over.

Each line carries one call, which is answered by the same service as one to a port of our own would
be.  TLS has identified who is on the other end when we opened the line.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import NoReturn

import grpc.aio
from google.protobuf.message import DecodeError

from lightyear_node.records import PeerName
from lightyear_node.transport import limits
from lightyear_node.transport.gate import Ask
from lightyear_node.transport.lines import Call, Direct
from lightyear_node.transport.messages import Malformed, Message
from lightyear_node.transport.service import Denied, Service
from lightyear_node.v1 import exchange_pb2 as pb


async def keep_lending(
    peer: PeerName, line_of: Callable[[], Direct | None], service: Service
) -> NoReturn:
    """Have one idle line open to a peer at all times; a used one is followed by the next.

    `line_of` tells which connection leads to the peer at this moment, if any does.
    """
    pause_s = limits.FETCH_PAUSE_S
    while True:
        pause_s = await _lend_once(peer, line_of(), service, pause_s)


async def _lend_once(
    peer: PeerName, line: Direct | None, service: Service, pause_s: float
) -> float:
    """Returns how long to pause after the next failure."""
    try:
        if line is not None and await _serve(peer, line, service):
            return limits.FETCH_PAUSE_S
    except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError, TimeoutError):
        pass  # the line broke, or they have no use for it; the heartbeat tells of both
    except asyncio.CancelledError:
        # gRPC ends a closed channel's calls as if the caller had been cancelled.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
    await asyncio.sleep(random.uniform(0, pause_s))
    return min(2 * pause_s, limits.LENT_PAUSE_S_MAX)


async def _serve(peer: PeerName, line: Direct, service: Service) -> bool:
    """Wait for a question and answer it; False if none came."""
    call = line.lend()
    try:
        question = await call.read()
        if question is grpc.aio.EOF:
            return False
        await _answer(peer, question, call, service)
        await call.done_writing()
        # The borrower ends the call when it has read enough.
        async with asyncio.timeout(limits.CHUNK_WRITE_S):
            await call.code()
        return True
    finally:
        call.cancel()


async def _answer(peer: PeerName, request: bytes, call: Call, service: Service) -> None:
    question = _question(request)
    kind = question.WhichOneof("question")

    async def reply(answer: Message) -> None:
        await call.write(answer.SerializeToString())

    async def send(piece: Message) -> None:
        await reply(pb.Answer(piece=piece))

    try:
        with service.call(peer, Ask(kind) if kind else Ask.HELLO):
            match kind:
                case "hello":
                    hello = await service.hello(peer, question.hello.SerializeToString())
                    await reply(pb.Answer(hello=hello))
                case "announce":
                    said = await service.announce(peer, question.announce.SerializeToString())
                    await reply(pb.Answer(announce=said))
                case "fetch":
                    await service.fetch(peer, question.fetch.SerializeToString(), send)
                case _:
                    raise Malformed("no question that we know")
    except Denied as denied:
        refusal = pb.Refusal(code=denied.code.value[0], details=denied.details)
        async with asyncio.timeout(limits.GIVE_UP_S):
            await reply(pb.Answer(refusal=refusal))


def _question(request: bytes) -> Message:
    """Bytes that are no question are taken for one that nobody knows, and refused like that."""
    try:
        return pb.Question.FromString(request)
    except DecodeError:
        return pb.Question()
