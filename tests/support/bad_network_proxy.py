"""A bad network between a node and a peer: a TCP proxy that disconnects, delays, corrupts, stalls.

peers.yaml has the proxy's address instead of the site's; TLS passes through unchanged, so that
neither side notices.  It runs in its own thread, and every attribute may be set at any time:

    with ChaosProxy("127.0.0.1:7000") as proxy:
        ...                         # proxy.address goes into peers.yaml
        proxy.rate_bytes_s = 1 << 20
        proxy.cut()
        print(proxy.counts.from_target)

Data inside the proxy is lost when a connection is cut, as in a router.  It is little: a delay holds
data back, but a rate limit keeps it with the sender.
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
"""Size of the kernel's buffers; data in them when a connection is cut is sent again."""
DELAYED_MAX = 256
"""Pieces of one direction that a delay can hold back: 4 MiB."""
POLL_S = 0.02
"""Resolution of `cut_every_s`."""


@dataclass(slots=True)
class Counts:
    """Totals since the start; bytes forwarded to the peer and from it."""

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
        """One-way delay of every piece, plus or minus up to `jitter_s`."""
        self.jitter_s = 0.0
        self.rate_bytes_s: float | None = None
        """Rate of each direction, shared by all connections."""
        self.cut_every_s: float | None = None
        """Interval at which all connections are cut."""
        self.stalled = False
        """Connections are accepted and all data is discarded.  A connection that has lost data is
        cut afterwards."""
        self._to_target = _Direction()
        self._from_target = _Direction()
        self._connections = self._cuts = 0
        self._by_reset = True
        self._running: set[asyncio.Task[None]] = set()
        self._listener = socket.create_server((host, 0), backlog=1024)
        _set_buffers(self._listener)
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
        """Close every connection now, with a reset or orderly; returns their number."""

        async def end() -> int:
            return self._cut(reset)

        return asyncio.run_coroutine_threadsafe(end(), self._loop).result()

    def flip_to_target(self) -> None:
        """Flip one bit of the next piece to the peer."""
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

    # -- In the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.closing(self._loop), contextlib.suppress(asyncio.CancelledError):
            self._serving = self._loop.create_task(self._serve())
            self._loop.run_until_complete(self._serving)

    async def _serve(self) -> None:
        self._listener.setblocking(False)
        with self._listener:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._cut_periodically())
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

    async def _cut_periodically(self) -> None:
        cut_at = self._loop.time()
        while True:
            await asyncio.sleep(POLL_S)
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
            _set_buffers(called)
            host, _, port = self.target.rpartition(":")
            await self._loop.sock_connect(called, (host, int(port)))
            await self._forward_both(caller, called)
            reset = False
        except asyncio.CancelledError:
            reset = self._by_reset
            raise
        except OSError:
            pass  # one side is unreachable or has disconnected: close both
        finally:
            _close(caller, called, reset=reset)

    async def _forward_both(self, caller: socket.socket, called: socket.socket) -> None:
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._forward(caller, called, self._to_target))
                both.create_task(self._forward(called, caller, self._from_target))
        except ExceptionGroup as broken:
            if broken.split(OSError)[1] is not None:
                raise
            raise ConnectionResetError("one side has disconnected") from None

    async def _forward(
        self, source: socket.socket, sink: socket.socket, direction: _Direction
    ) -> None:
        delayed: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(DELAYED_MAX)
        async with asyncio.TaskGroup() as ends:
            ends.create_task(self._deliver(delayed, sink, direction))
            lossy, due = False, 0.0
            while piece := await self._loop.sock_recv(source, PIECE_BYTES):
                if self.stalled:
                    lossy = True
                    continue
                if lossy:
                    raise ConnectionResetError("bytes were lost")
                await direction.wait_for_rate(len(piece), self.rate_bytes_s)
                delay_s = self.delay_s + random.uniform(-self.jitter_s, self.jitter_s)
                # Never before the previous one: TCP would restore the order.
                due = max(due, self._loop.time() + delay_s)
                await delayed.put((due, direction.maybe_corrupted(piece)))
            await delayed.put((due, b""))

    async def _deliver(
        self,
        delayed: asyncio.Queue[tuple[float, bytes]],
        sink: socket.socket,
        direction: _Direction,
    ) -> None:
        while True:
            due, piece = await delayed.get()
            if (wait_s := due - self._loop.time()) > 0:
                await asyncio.sleep(wait_s)
            if not piece:
                sink.shutdown(socket.SHUT_WR)
                return
            await self._loop.sock_sendall(sink, piece)
            direction.passed += len(piece)


class _Direction:
    """The state of one direction, shared by all connections."""

    def __init__(self) -> None:
        self.passed = 0
        self.flips = 0
        self._free_at = 0.0

    async def wait_for_rate(self, length: int, rate_bytes_s: float | None) -> None:
        """Wait until the rate allows so many more bytes."""
        if rate_bytes_s is not None:
            now = asyncio.get_running_loop().time()
            self._free_at = max(now, self._free_at) + length / rate_bytes_s
            await asyncio.sleep(self._free_at - now)

    def maybe_corrupted(self, piece: bytes) -> bytes:
        if not self.flips:
            return piece
        self.flips -= 1
        middle = len(piece) // 2
        return piece[:middle] + bytes([piece[middle] ^ 1]) + piece[middle + 1 :]


def _set_buffers(one: socket.socket) -> None:
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        one.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)


def _close(*sockets: socket.socket, reset: bool) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            if reset:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
