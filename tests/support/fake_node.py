"""A stand-in for a node: serves the contents of `answers.json` on the admin socket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from lightyear_node.observe.admin_socket import AdminServer

STATE = Path("state")
STATE.mkdir(exist_ok=True)
ANSWERS = Path("answers.json").read_text()


async def serve() -> None:
    answers = json.loads(ANSWERS) | {"environment": dict(os.environ)}
    server = AdminServer(STATE, {name: lambda request: answers[request["ask"]] for name in answers})
    stopped = asyncio.Event()
    if "--stubborn" not in sys.argv:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await server.start()
    await stopped.wait()


if "--crash" in sys.argv:
    print("cannot listen: the port is taken")
    sys.exit(7)
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
asyncio.run(serve())
