"""Runs one node in this process until it ends: file descriptors, state directory, signals."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial

from lightyear_node.node.construction import prepare
from lightyear_node.node.daemon import Node
from lightyear_node.node.home import Home
from lightyear_node.node.worker_process import WORKER_PROGRAM
from lightyear_node.storage.disk_space import open_when_possible
from lightyear_node.storage.file_descriptors import raise_limit, too_few


def run_node(
    home: Home,
    log: logging.Logger,
    load: Callable[[], Home],
    *,
    exit_when_done: bool = False,
    recovered: bool = False,
    worker_program: Sequence[str] = WORKER_PROGRAM,
) -> None:
    """`load` reads the settings again.  `worker_program` is set by the laboratory only."""
    options = {"exit_when_done": exit_when_done, "recovered": recovered}

    def make() -> Node:
        return Node(prepare(home, log, worker_program=worker_program, **options), load)

    log.info("%s of federation %s", home.us, home.federation.federation, extra={"event": "start"})
    asyncio.run(_run(home, log, make))


async def _run(home: Home, log: logging.Logger, make: Callable[[], Node]) -> None:
    scarce = too_few(raise_limit(), len(home.others))
    if scarce is not None:
        log.warning("%s", scarce, extra={"event": "descriptors"})
    warn = partial(log.warning, "%s", extra={"event": "disk"})
    node = await open_when_possible(home.directory / home.config.state_dir, make, warn)
    loop = asyncio.get_running_loop()

    def stop(name: str) -> None:
        log.info("%s: stopping", name, extra={"event": "stopping"})
        node.request_stop()
        # A second signal ends the process at once.
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, os._exit, 130)

    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, stop, sig.name)
    loop.add_signal_handler(signal.SIGHUP, node.request_reload)
    await node.run()
