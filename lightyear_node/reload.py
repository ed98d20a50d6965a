"""What an operator changes while the node runs: noticed, compared, and said what it means.

Owns which settings can change in a running node and which cannot: who the members are, their
certificates and addresses, when rounds close and how many there are can; whatever a model depends
on waits for the next start.  Must not know how a change is carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from lightyear_node.config.site import NODE_FILE
from lightyear_node.errors import LightyearError
from lightyear_node.home import Home
from lightyear_node.records import Fingerprint, PeerName

POLL_S = 0.5
"""A change is in force within a second, reading included."""
SETTLE_S = 0.05
"""Before files are read again that changed while they were read."""

LIVE = ("rounds", "barrier")
"""Of peers.yaml, besides its peers: what a running node can take over."""

Pin = tuple[PeerName, Fingerprint]
Mark = tuple[tuple[int, ...] | None, ...]
"""What tells one state of the watched files from another."""


@dataclass(frozen=True, slots=True)
class Changes:
    """From the settings in force to those just read; true if a running node can act on them."""

    renewed: bool = False
    """Our own certificate is another one."""
    removed: tuple[PeerName, ...] = ()
    joined: tuple[PeerName, ...] = ()
    moved: tuple[PeerName, ...] = ()
    """At another address."""
    pinned: tuple[Pin, ...] = ()
    unpinned: tuple[Pin, ...] = ()
    """Certificates, ours included, that have come and gone; not those of removed peers."""
    terms: tuple[str, ...] = ()
    """Settings of the rounds that have changed, by their keys."""
    postponed: tuple[str, ...] = ()
    """Settings that take effect after a restart, by their keys."""

    def __bool__(self) -> bool:
        changed = (self.removed, self.joined, self.moved, self.pinned, self.unpinned, self.terms)
        return self.renewed or any(changed)

    def distrusted(self) -> frozenset[PeerName]:
        """Whose connections must not outlive the change."""
        return frozenset(self.removed) | {peer for peer, _ in self.unpinned}

    def affected(self) -> frozenset[PeerName]:
        """Whom we must call in another way than before; everybody, if `renewed`."""
        pins = {peer for peer, _ in (*self.pinned, *self.unpinned)}
        return frozenset({*self.removed, *self.joined, *self.moved, *pins})

    def to_plain(self) -> dict[str, Any]:
        """For the journal: all that changed, and nothing that did not."""
        plain = {
            "removed": list(self.removed),
            "joined": list(self.joined),
            "moved": list(self.moved),
            "pinned": [list(pin) for pin in self.pinned],
            "unpinned": [list(pin) for pin in self.unpinned],
            "terms": list(self.terms),
        }
        return {key: value for key, value in plain.items() if value}

    def __str__(self) -> str:
        words = ["we have a new certificate"] * self.renewed
        words += [f"{peer} is removed" for peer in self.removed]
        words += [f"{peer} has joined" for peer in self.joined]
        words += [f"{peer} has another address" for peer in self.moved]
        words += [f"{pin} of {peer} is accepted" for peer, pin in self.pinned]
        words += [f"{pin} of {peer} is no longer accepted" for peer, pin in self.unpinned]
        words += [f"`{key}` has another value" for key in self.terms]
        return ", ".join(words)


def compare(running: Home, found: Home) -> Changes:
    if found.us != running.us:
        return Changes(postponed=(f"our new name {found.us}",))
    # By name: under another rule than the running one, `others` may mean nobody.
    listed = set() if running.rule.alone else set(found.certificates) - {found.us}
    before = set(running.others)
    staying = before & listed
    addresses = {peer: running.address_of(peer) for peer in staying}
    settings = list(_differing(running.agreement, found.agreement))
    terms = [key for key in settings if _is_live(key)]
    postponed = [key for key in settings if not _is_live(key)]
    postponed += [f"{NODE_FILE}: {key}" for key in _differing(running.site, found.site)]
    return Changes(
        renewed=found.identity.fingerprint != running.identity.fingerprint,
        removed=tuple(sorted(before - listed)),
        joined=tuple(sorted(listed - before)),
        moved=tuple(peer for peer, at in addresses.items() if found.address_of(peer) != at),
        pinned=tuple(_more(sorted({*staying, running.us}), found, running)),
        unpinned=tuple(_more(sorted({*staying, running.us}), running, found)),
        terms=tuple(terms),
        postponed=tuple(postponed),
    )


def adopted(running: Home, found: Home) -> Home:
    """What is in force from now on: of `found`, all that needs no restart."""
    live = {key: getattr(found.agreement, key) for key in ("peers", *LIVE)}
    return replace(
        running,
        agreement=running.agreement.model_copy(update=live),
        identity=found.identity,
        certificates=found.certificates,
    )


def _is_live(key: str) -> bool:
    return key.partition(".")[0] in LIVE


def _more(peers: Sequence[PeerName], one: Home, other: Home) -> Iterator[Pin]:
    """The certificates that one home has and the other has not."""
    for peer in peers:
        known = {certificate.fingerprint for certificate in other.certificates[peer]}
        pins = (certificate.fingerprint for certificate in one.certificates[peer])
        yield from ((peer, pin) for pin in pins if pin not in known)


def _differing(old: BaseModel, new: BaseModel) -> Iterator[str]:
    """Keys with another value, those of tables as `table.key`; who the peers are is not meant."""
    for key in type(old).model_fields:
        before, after = getattr(old, key), getattr(new, key)
        if key == "peers" or before == after:
            continue
        if isinstance(before, BaseModel) and type(before) is type(after):
            yield from (f"{key}.{inner}" for inner in _differing(before, after))
        else:
            yield key


class Watch:
    """Reads the home again when its files change, or when it is asked to.

    Files that cannot be used are reported once, and change nothing: `changed` goes on waiting.
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
        # The first look always reads: something may have changed while the task was built.
        self._seen: Mark | None = None
        self._asked = asyncio.Event()
        self._complaint = ""
        # A thread of its own: those of the event loop may all be busy with weights.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reload")

    def ask(self) -> None:
        """Read again, whether anything seems to have changed or not."""
        self._asked.set()

    async def changed(self) -> Home:
        """The home as it is on the disk after the next change."""
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
            # Replaced while it was read, such as a key whose certificate is about to follow.
            mark = again
            await asyncio.sleep(SETTLE_S)
        self._seen = mark
        if problem and (asked or problem != self._complaint):
            text = "the settings stay as they are: %s"
            self._log.warning(text, problem, extra={"event": "settings"})
        self._complaint = problem
        self._on_read(not problem)
        return home

    def _mark(self) -> Mark:
        return tuple(_mark_of(path) for path in self._watched)


def _mark_of(path: Path) -> tuple[int, ...] | None:
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_ino, about.st_size, about.st_dev
