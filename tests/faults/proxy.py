"""A bad network between a node and a peer: a TCP proxy that cuts, delays, corrupts and stalls.

The peers' file names the proxy's address in place of the site's own; TLS passes through untouched,
so neither side can tell.  It runs in a thread of its own, and every attribute may be set at any
time:

    with ChaosProxy("127.0.0.1:7000") as proxy:
        ...                         # proxy.address goes into peers.yaml
        proxy.rate_bytes_s = 1 << 20
        proxy.cut()
        print(proxy.counts.from_target)

A piece that is on its way in here when a connection is cut is lost, as in a router.  There is
little of it: a delay holds pieces back, a rate keeps them with their sender.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from dataclasses import dataclass
from typing import Self

LOOPBACK = "127.0.0.1"
PIECE_BYTES = 16 << 10
SOCKET_BYTES = 64 << 10
"""Of the kernel's buffers: what waits in them when a line is cut is sent again afterwards."""
DELAYED_MAX = 256
"""Pieces of one direction that a delay holds back: 4 MiB."""
LOOK_S = 0.02
"""How often the clock of `cut_every_s` is looked at."""


@dataclass(slots=True)
class Counts:
    """Since the start.  Bytes are those that were passed on: to the peer, and back from it."""

    to_target: int = 0
    from_target: int = 0
    connections: int = 0
    cuts: int = 0
    """Connections that were cut, not calls of `cut`."""


class ChaosProxy:
    """Used as a context manager; `target` and `address` are host:port."""

    def __init__(self, target: str, host: str = LOOPBACK) -> None:
        self.target = target
        self.delay_s = 0.0
        """One way, of every piece; with `jitter_s`, anything up to that much more or less."""
        self.jitter_s = 0.0
        self.rate_bytes_s: float | None = None
        """Of each direction, shared by all connections."""
        self.cut_every_s: float | None = None
        """As by `cut`, again and again."""
        self.stalled = False
        """Connections are accepted and all bytes swallowed.  One that has lost any cannot go on
        afterwards, and is cut then."""
        self._to_target = _Direction()
        self._from_target = _Direction()
        self._connections = self._cuts = 0
        self._by_reset = True
        self._running: set[asyncio.Task[None]] = set()
        self._listener = socket.create_server((host, 0), backlog=1024)
        _shape(self._listener)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="chaos-proxy")

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    @property
    def counts(self) -> Counts:
        passed = self._to_target.passed, self._from_target.passed
        return Counts(*passed, connections=self._connections, cuts=self._cuts)

    def cut(self, *, reset: bool = True) -> int:
        """End every connection now, with a reset or an orderly end; returns how many there were."""

        async def end() -> int:
            return self._cut(reset)

        return asyncio.run_coroutine_threadsafe(end(), self._loop).result()

    def flip_to_target(self) -> None:
        """One bit of the next piece that goes to the peer is wrong."""
        self._to_target.flips += 1

    def flip_from_target(self) -> None:
        self._from_target.flips += 1

    @property
    def flips_pending(self) -> int:
        return self._to_target.flips + self._from_target.flips

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join()

    # In the thread.

    def _run(self) -> None:
        with contextlib.closing(self._loop), contextlib.suppress(asyncio.CancelledError):
            self._serving = self._loop.create_task(self._serve())
            self._loop.run_until_complete(self._serving)

    async def _serve(self) -> None:
        self._listener.setblocking(False)
        with self._listener:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._cut_often())
                while True:
                    caller, _ = await self._loop.sock_accept(self._listener)
                    self._connections += 1
                    task = tasks.create_task(self._connect(caller))
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)

    def _cut(self, reset: bool) -> int:
        self._by_reset, cut = reset, len(self._running)
        for task in self._running:
            task.cancel()
        self._cuts += cut
        return cut

    async def _cut_often(self) -> None:
        cut_at = self._loop.time()
        while True:
            await asyncio.sleep(LOOK_S)
            now = self._loop.time()
            if self.cut_every_s is None:
                cut_at = now
            elif now >= cut_at + self.cut_every_s:
                cut_at = now
                self._cut(reset=True)

    async def _connect(self, caller: socket.socket) -> None:
        called, reset = socket.socket(), True
        called.setblocking(False)
        try:
            _shape(called)
            host, _, port = self.target.rpartition(":")
            await self._loop.sock_connect(called, (host, int(port)))
            await self._join(caller, called)
            reset = False
        except asyncio.CancelledError:
            reset = self._by_reset
            raise
        except OSError:
            pass  # one side is not there, or has hung up; so does the other
        finally:
            _hang_up(caller, called, reset=reset)

    async def _join(self, caller: socket.socket, called: socket.socket) -> None:
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass_on(caller, called, self._to_target))
                both.create_task(self._pass_on(called, caller, self._from_target))
        except ExceptionGroup as broken:
            if broken.split(OSError)[1] is not None:
                raise
            raise ConnectionResetError("one side has hung up") from None

    async def _pass_on(self, source: socket.socket, sink: socket.socket, way: _Direction) -> None:
        delayed: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(DELAYED_MAX)
        async with asyncio.TaskGroup() as ends:
            ends.create_task(self._deliver(delayed, sink, way))
            lossy, due = False, 0.0
            while piece := await self._loop.sock_recv(source, PIECE_BYTES):
                if self.stalled:
                    lossy = True
                    continue
                if lossy:
                    raise ConnectionResetError("bytes were lost")
                await way.passage(len(piece), self.rate_bytes_s)
                late_s = self.delay_s + random.uniform(-self.jitter_s, self.jitter_s)
                # Never before the one in front of it: TCP would put them in order again.
                due = max(due, self._loop.time() + late_s)
                await delayed.put((due, way.spoiled(piece)))
            await delayed.put((due, b""))

    async def _deliver(
        self, delayed: asyncio.Queue[tuple[float, bytes]], sink: socket.socket, way: _Direction
    ) -> None:
        while True:
            due, piece = await delayed.get()
            if (wait_s := due - self._loop.time()) > 0:
                await asyncio.sleep(wait_s)
            if not piece:
                sink.shutdown(socket.SHUT_WR)
                return
            await self._loop.sock_sendall(sink, piece)
            way.passed += len(piece)


class _Direction:
    """What all connections have in common, one way."""

    def __init__(self) -> None:
        self.passed = 0
        self.flips = 0
        self._free_at = 0.0

    async def passage(self, length: int, rate_bytes_s: float | None) -> None:
        """Wait until so much more may pass."""
        if rate_bytes_s is not None:
            now = asyncio.get_running_loop().time()
            self._free_at = max(now, self._free_at) + length / rate_bytes_s
            await asyncio.sleep(self._free_at - now)

    def spoiled(self, piece: bytes) -> bytes:
        if not self.flips:
            return piece
        self.flips -= 1
        middle = len(piece) // 2
        return piece[:middle] + bytes([piece[middle] ^ 1]) + piece[middle + 1 :]


def _shape(one: socket.socket) -> None:
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        one.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)


def _hang_up(*sockets: socket.socket, reset: bool) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            if reset:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
