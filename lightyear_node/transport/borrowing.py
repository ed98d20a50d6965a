"""Calls to a site that nobody can reach, over the lines that it has lent us.

Such a site opens streams to every other one and waits.  Who wants to call it takes one of them,
sends its question, and reads the answer as if it had come from a connection of its own.  A line
serves one call; the site opens the next one at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import grpc.aio
from grpc import StatusCode

from lightyear_node.records import PeerName
from lightyear_node.transport import limits
from lightyear_node.transport.lines import LineFailed, unbroken
from lightyear_node.transport.messages import Malformed, Message
from lightyear_node.v1 import exchange_pb2 as pb

ANSWERS_AHEAD = 2
"""Read from the line and not yet taken."""
_CODES = {code.value[0]: code for code in StatusCode}


class LentLine:
    """One stream of a peer, and one call over it.  All of gRPC stays in `serve`."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._question: asyncio.Future[Message] = loop.create_future()
        self._answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(ANSWERS_AHEAD)
        self._serving: asyncio.Task[None] | None = None
        self._given_up = False

    async def serve(self, context: Any) -> None:
        """Runs as long as the line is open: first idle, then carrying one call."""
        self._serving = asyncio.current_task()
        try:
            question = await self._question
            await context.write(question.SerializeToString())
            while True:
                await self._room.acquire()
                answer = await unbroken(context.read())
                if answer is grpc.aio.EOF:
                    return
                self._answers.put_nowait(bytes(answer))
        except asyncio.CancelledError:
            if not self._given_up:
                raise  # the peer is gone
            assert self._serving is not None
            self._serving.uncancel()
            await context.abort(StatusCode.CANCELLED, "no longer wanted")
        finally:
            self._answers.put_nowait(None)

    def ask(self, question: Message) -> None:
        self._question.set_result(question)

    async def read(self) -> Message | None:
        """The next answer; None where there is none any more."""
        answer = await self._answers.get()
        self._room.release()
        if answer is None:
            self._answers.put_nowait(None)
            return None
        parsed = pb.Answer.FromString(answer)
        if parsed.WhichOneof("answer") == "refusal":
            code = _CODES.get(parsed.refusal.code, StatusCode.UNKNOWN)
            raise LineFailed(code, parsed.refusal.details)
        return parsed

    def give_up(self) -> None:
        """End the call, whatever has come of it; the stream ends with it."""
        self._given_up = True
        if self._serving is not None and not self._serving.done():
            self._serving.cancel()


class LentLines:
    """The lines that peers have lent us, by peer."""

    def __init__(self) -> None:
        self._idle: dict[PeerName, deque[LentLine]] = {}
        self._arrived = asyncio.Condition()

    async def lend(self, peer: PeerName, context: Any) -> None:
        line = LentLine()
        idle = self._idle.setdefault(peer, deque())
        idle.append(line)
        async with self._arrived:
            self._arrived.notify_all()
        try:
            await line.serve(context)
        finally:
            if line in idle:
                idle.remove(line)

    async def borrow(self, peer: PeerName) -> LentLine:
        try:
            async with asyncio.timeout(limits.LENT_WAIT_S), self._arrived:
                await self._arrived.wait_for(lambda: self._idle.get(peer))
                return self._idle[peer].popleft()
        except TimeoutError:
            raise LineFailed(StatusCode.UNAVAILABLE, "it has not called us lately") from None

    def close(self) -> None:
        for idle in self._idle.values():
            for line in idle:
                line.give_up()


class Borrowed:
    """A peer without an address, as a client sees it."""

    def __init__(self, peer: PeerName, lines: LentLines) -> None:
        self.address = "the line that it opens to us"
        self._peer = peer
        self._lines = lines

    async def hello(self, greeting: Message) -> Message:
        return (await self._asked(pb.Question(hello=greeting), "hello")).hello

    async def announce(self, announcement: Message) -> Message:
        return (await self._asked(pb.Question(announce=announcement), "announce")).announce

    def fetch(self, request: Message) -> _BorrowedPieces:
        return _BorrowedPieces(self._peer, self._lines, request)

    async def close(self) -> None:
        """The lines are the peer's own."""

    async def _asked(self, question: Message, kind: str) -> Message:
        line = await self._lines.borrow(self._peer)
        try:
            async with asyncio.timeout(limits.CALL_S):
                line.ask(question)
                answer = await line.read()
        except TimeoutError:
            raise LineFailed(StatusCode.DEADLINE_EXCEEDED, "") from None
        finally:
            line.give_up()
        if answer is None:
            raise LineFailed(StatusCode.UNAVAILABLE, "the line broke")
        if answer.WhichOneof("answer") != kind:
            raise Malformed("an answer to another question")
        return answer


class _BorrowedPieces:
    """A fetch over a borrowed line, which is taken when the first piece is read."""

    def __init__(self, peer: PeerName, lines: LentLines, request: Message) -> None:
        self._peer = peer
        self._lines = lines
        self._request = request
        self._line: LentLine | None = None

    async def read(self) -> Message | None:
        if self._line is None:
            self._line = await self._lines.borrow(self._peer)
            self._line.ask(pb.Question(fetch=self._request))
        answer = await self._line.read()
        if answer is None:
            return None
        if answer.WhichOneof("answer") != "piece":
            raise Malformed("an answer to another question")
        return answer.piece

    def cancel(self) -> None:
        if self._line is not None:
            self._line.give_up()
