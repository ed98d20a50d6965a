"""The local admin socket, over which commands such as `lightyear-node status` query a node.

A Unix socket in the state directory, accessible to the node's user only.  Each connection carries
one request and one response, each a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightyear_node.errors import LightyearError

SOCKET_NAME = "admin.sock"
REQUEST_BYTES_MAX = 64 << 10
ANSWER_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 16
"""Open at the same time; further connections are closed without an answer."""
_PATH_MAX = 100
"""The address of a Unix socket holds about 107 bytes; the path may be longer."""

Handler = Callable[[dict[str, Any]], Any]


class NotRunning(LightyearError):
    exit_code = 3


class AdminServer:
    def __init__(self, state_dir: Path, routes: dict[str, Handler]) -> None:
        self._state_dir = state_dir
        self.routes = routes
        self._server: asyncio.Server | None = None
        self._open = 0

    async def start(self) -> None:
        """Open the socket if it is not open."""
        if self._server is not None:
            return
        (self._state_dir / SOCKET_NAME).unlink(missing_ok=True)
        with _address(self._state_dir) as address:
            before = os.umask(0o177)
            try:
                self._server = await asyncio.start_unix_server(
                    self._serve, address, limit=REQUEST_BYTES_MAX
                )
            finally:
                os.umask(before)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        (self._state_dir / SOCKET_NAME).unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open > CONNECTIONS_MAX:
                return
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                request = json.loads(await reader.readline())
                answer = self.routes[request["ask"]](request)
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (TimeoutError, ValueError, KeyError, TypeError, RecursionError, ConnectionError):
            pass  # an invalid request gets no answer
        finally:
            self._open -= 1
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


def ask(state_dir: Path, question: str, **arguments: Any) -> Any:
    """Query the node running on this state directory; blocks, for the command line."""
    with socket.socket(socket.AF_UNIX) as connection, _address(state_dir) as address:
        connection.settimeout(ANSWER_TIMEOUT_S)
        try:
            connection.connect(address)
            connection.sendall(json.dumps({"ask": question, **arguments}).encode() + b"\n")
            with connection.makefile("rb") as stream:
                line = stream.readline()
        except (FileNotFoundError, ConnectionError):
            raise NotRunning(
                f"no node is running on {state_dir}",
                hint="start it with `lightyear-node start --peers peers.yaml`",
            ) from None
        except TimeoutError:
            raise NotRunning(f"the node on {state_dir} does not answer") from None
    if not line:
        raise NotRunning(f"the node on {state_dir} did not understand `{question}`")
    return json.loads(line)


@contextmanager
def _address(state_dir: Path) -> Iterator[str]:
    """Yield the socket's path; through an open directory descriptor if it is too long."""
    path = str(state_dir / SOCKET_NAME)
    if len(os.fsencode(path)) <= _PATH_MAX or not os.path.isdir("/proc/self/fd"):
        yield path
        return
    try:
        directory = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        yield path[:_PATH_MAX]  # connecting to it fails: no node is running
        return
    try:
        yield f"/proc/self/fd/{directory}/{SOCKET_NAME}"
    finally:
        os.close(directory)
