"""Reloads the configuration of a running node: reads changed files and tells every part.

`config_changes` decides what may change in a running node.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lightyear_node.errors import ConfigError, JournalCorrupt, LightyearError, Shortage
from lightyear_node.node.active_config import ActiveConfig
from lightyear_node.node.config_changes import adopted, compare
from lightyear_node.node.gossip import Gossip
from lightyear_node.node.home import Home
from lightyear_node.node.inbox import Inbox
from lightyear_node.node.peer_connections import PeerConnections, Spawn
from lightyear_node.node.recorder import Recorder
from lightyear_node.observe.observer import Observer
from lightyear_node.protocol.events import Reconfigured
from lightyear_node.storage.atomic_files import file_stamp
from lightyear_node.storage.disk_space import DiskSpace
from lightyear_node.storage.file_descriptors import none_left

POLL_S = 0.5
"""Interval between looks at the files: a change is in force within a second."""
SETTLE_S = 0.05
"""Pause before files are read again that changed while they were read."""

Mark = tuple[tuple[int, ...] | None, ...]
"""Identifies one state of the watched files: times, inodes, sizes."""


@dataclass(eq=False, repr=False)
class ConfigReload:
    """Applies changed settings as far as a running node can."""

    _active: ActiveConfig
    _recorder: Recorder
    _gossip: Gossip
    _connections: PeerConnections
    _disk_space: DiskSpace
    _observer: Observer
    _inbox: Inbox
    _spawn: Spawn
    _postponed: tuple[str, ...] = field(init=False, default=())

    async def follow(self, watcher: ConfigWatcher) -> None:
        """Apply every change of the files; runs until cancelled."""
        while True:
            self.apply(await watcher.changed())

    def apply(self, found: Home) -> None:
        active = self._active
        changes = compare(active.home, found)
        if changes.postponed and changes.postponed != self._postponed:
            text = "takes effect after a restart: %s"
            postponed = ", ".join(changes.postponed)
            self._observer.log.warning(text, postponed, extra={"event": "settings"})
        self._postponed = changes.postponed
        if not changes:
            return
        home = active.home = adopted(active.home, found)
        record = partial(self._recorder.config_changed, changes, home.federation.digest())
        try:
            record()
        except Shortage:
            # A removed peer is cut off now, and not when there is space to record it.
            self._spawn(self._disk_space.record(record))
        except JournalCorrupt:
            pass  # the change takes effect also in a node that can record nothing any more
        self._recorder.members_changed(changes.removed)
        self._gossip.reconfigure(home.federation.digest(), home.federation.clauses())
        self._connections.replace(home, changes)
        expires = home.identity.certificate.expires.timestamp()
        self._observer.reconfigured(str(changes), expires, home.others, home.federation.rounds)
        if changes.removed or changes.joined or changes.live_settings:
            self._inbox.put(self._reconfigured(home))

    def _reconfigured(self, home: Home) -> Reconfigured:
        active = self._active
        try:
            active.parameters = home.parameters()
        except ConfigError as problem:
            # Removed peers are gone at once all the same; rounds wait for a valid configuration.
            text = "with these settings it will not start again: %s"
            self._observer.log.warning(text, problem, extra={"event": "settings"})
            return Reconfigured(active.parameters, active.parameters.peers - set(home.others))
        return Reconfigured(active.parameters)


class ConfigWatcher:
    """Reads the configuration again when its files change, or on request.

    Invalid files are reported once and change nothing: `changed` goes on waiting.
    """

    def __init__(
        self,
        load: Callable[[], Home],
        watched: Sequence[Path],
        log: logging.Logger,
        on_read: Callable[[bool], None] = lambda usable: None,
    ) -> None:
        self._load = load
        self._on_read = on_read
        self._watched = watched
        self._log = log
        # The first look always reads: files may have changed while the task was built.
        self._seen: Mark | None = None
        self._asked = asyncio.Event()
        self._last_problem = ""
        # Its own thread: those of the event loop may all be busy with weights.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reload")

    def ask(self) -> None:
        """Read the files again even if they seem unchanged."""
        self._asked.set()

    async def changed(self) -> Home:
        """Wait for the next change and return the new configuration."""
        while True:
            asked, mark = self._asked.is_set(), self._mark()
            if asked or mark != self._seen:
                self._asked.clear()
                home = await self._read(mark, asked)
                if home is not None:
                    return home
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._asked.wait()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _read(self, mark: Mark, asked: bool) -> Home | None:
        loop = asyncio.get_running_loop()
        while True:
            home: Home | None = None
            problem = ""
            try:
                home = await loop.run_in_executor(self._thread, self._load)
            except LightyearError as error:
                problem = f"{error}; {error.hint}" if error.hint else str(error)
            except (OSError, ValueError, RecursionError) as error:
                problem = str(error)
            again = self._mark()
            if again == mark:
                break
            # Replaced meanwhile, such as a key whose certificate is about to follow.
            mark = again
            await asyncio.sleep(SETTLE_S)
        if problem and none_left():
            self._seen = None  # no file descriptor was left: read again
            return None
        self._seen = mark
        if problem and (asked or problem != self._last_problem):
            text = "the settings stay as they are: %s"
            self._log.warning(text, problem, extra={"event": "settings"})
        self._last_problem = problem
        self._on_read(not problem)
        return home

    def _mark(self) -> Mark:
        return tuple(map(file_stamp, self._watched))
