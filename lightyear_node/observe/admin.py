"""The local admin socket: how `lightyear-node status` asks a running node.

A Unix socket in the state directory, for the node's own user only; one JSON line in, one out.
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
_PATH_MAX = 100
"""A Unix socket's address holds some 107 bytes; a state directory's path may be longer."""

Answer = Callable[[dict[str, Any]], Any]


class NotRunning(LightyearError):
    exit_code = 3


class AdminServer:
    def __init__(self, state_dir: Path, routes: dict[str, Answer]) -> None:
        self._state_dir = state_dir
        self._routes = routes
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        (self._state_dir / SOCKET_NAME).unlink(missing_ok=True)
        with _reachable(self._state_dir) as address:
            before = os.umask(0o177)
            try:
                self._server = await asyncio.start_unix_server(
                    self._converse, address, limit=REQUEST_BYTES_MAX
                )
            finally:
                os.umask(before)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        (self._state_dir / SOCKET_NAME).unlink(missing_ok=True)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                request = json.loads(await reader.readline())
                answer = self._routes[request["ask"]](request)
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (TimeoutError, ValueError, KeyError, TypeError, ConnectionError):
            pass  # a local caller that speaks nonsense gets no answer and does no harm
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


def ask(state_dir: Path, question: str, **arguments: Any) -> Any:
    """Ask the node that runs on this state directory; blocks, for the command line."""
    with socket.socket(socket.AF_UNIX) as connection, _reachable(state_dir) as address:
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
def _reachable(state_dir: Path) -> Iterator[str]:
    """The socket's path, by way of an open directory where it would be too long."""
    path = str(state_dir / SOCKET_NAME)
    if len(os.fsencode(path)) <= _PATH_MAX or not os.path.isdir("/proc/self/fd"):
        yield path
        return
    try:
        directory = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        yield path[:_PATH_MAX]  # connecting to it says that nobody is there
        return
    try:
        yield f"/proc/self/fd/{directory}/{SOCKET_NAME}"
    finally:
        os.close(directory)
