"""Disk space: how much there is, how much is needed, and what happens if it is short.

Computes quota and reserve, and the order in which peers' updates are deleted.  A step of our own
that fails on a full disk is retried until it succeeds, while everything else continues.  Rounds are
unknown here, and files are deleted by the `release` callback of their owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from lightyear_node.config.node import DiskConfig
from lightyear_node.errors import ConfigError, DiskFull, Shortage, StoreError, TooManyFiles
from lightyear_node.storage.file_descriptors import DescriptorListener, Descriptors
from lightyear_node.types import Digest

JOURNAL_BYTES = 8 << 20
"""For the journal's write-ahead log, checkpointed every 4 MiB, and for its growth."""
RESERVE_BYTES = 16 << 20
RESERVE_MODELS = 2
"""Default of `disk.reserve`: this many models plus `RESERVE_BYTES`."""
PAUSE_S = 1.0
PAUSE_S_MAX = 30.0
CHECK_S = 1.0
POLL_S = 0.2
GROWN_BYTES = 1 << 20
"""Retry at once if free space has grown by this much since the last attempt."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class SpaceNeeds:
    """The disk space that a site's rounds need, in bytes."""

    model: int = 0
    """One stored model."""
    update: int = 0
    """One update as it is sent."""
    carry: int = 0
    """The optimizer's state; 0 if not known yet."""
    peers: int = 0
    models_kept: int = 1

    @property
    def training(self) -> int:
        """Bytes that one training writes."""
        return self.model + self.carry + (self.update if self._rounded else 0)

    @property
    def total(self) -> int:
        return sum(count * size for count, size, _ in self._parts()) + JOURNAL_BYTES

    def __str__(self) -> str:
        parts = [f"{count} {what} of {size_text(size)}" for count, size, what in self._parts()]
        return f"{', '.join(parts)}, and {size_text(JOURNAL_BYTES)} for the journal"

    @property
    def _rounded(self) -> bool:
        """Whether the update is a rounded copy of the trained model."""
        return self.update != self.model

    def _parts(self) -> Iterator[tuple[int, int, str]]:
        yield self.models_kept + 2, self.model, "models (the last, the best and the next)"
        # Two are being offered while the next one is written.
        yield 3, self.update, "updates of ours"
        if self._rounded:
            yield 2, self.model, "trained models, of which the updates are rounded copies"
        yield self.peers, self.update, "updates of the others"
        if self.carry:
            yield 2, self.carry, "states of the optimizer"


def default_reserve(model_bytes: int) -> int:
    return RESERVE_BYTES + RESERVE_MODELS * model_bytes


def check_quota(quota: int | None, needs: SpaceNeeds) -> None:
    if quota is None or quota >= needs.total:
        return
    raise ConfigError(
        f"disk.quota is {size_text(quota)}, but this site's rounds need {size_text(needs.total)}:"
        f" {needs}",
        hint="raise `disk.quota` in node.yaml, or keep fewer models (`keep.models`)",
    )


def expendable(
    *,
    received: Set[Digest],
    parts: Set[Digest],
    wanted: Set[Digest],
    needed: Set[Digest],
    for_ourselves: bool,
) -> list[Digest]:
    """The complete (`received`) and partial updates that may be deleted, least useful first.

    `needed` must stay: our own, those being judged or merged, those being received.  Partial old
    updates and those that only shorten the next transfer do not affect the round.  Those that the
    round would use (`wanted`) are deleted only for a step of our own; they are fetched again.
    """
    stored = [parts - needed, received - needed]
    order = [group - wanted for group in stored]
    if for_ourselves:
        order += [group & wanted for group in stored]
    return list(dict.fromkeys(digest for group in order for digest in sorted(group)))


class SpaceListener(DescriptorListener, Protocol):
    """Notified once when the disk is too full, and once when that is over."""

    def disk_low(self, text: str) -> None: ...

    def disk_recovered(self, text: str) -> None: ...


Release = Callable[[Callable[[], bool], bool], None]
"""Deletes expendable updates until the first argument returns true; the second says whether the
space is for a step of our own."""


class DiskSpace:
    """For use in one event loop; `problem` and `free` are thread-safe."""

    def __init__(
        self,
        folder: Path,
        disk: DiskConfig,
        listener: SpaceListener,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.needs = SpaceNeeds()
        self.files = Descriptors(listener)
        """File descriptors, which a step of our own needs as well."""
        self.problem: str | None = None
        """The current problem and what to do about it; None if there is none."""
        self.release: Release = lambda enough, for_ourselves: None
        self._disk = disk
        self._listener = listener
        self._now = now
        self._downloading = 0
        self._refused = 0
        self._failed: tuple[int, str] | None = None
        self._retry_at = 0.0
        self._retry_pause_s = 0.0
        self._waiting: dict[object, tuple[int, str]] = {}

    # Available space.

    def free(self) -> int:
        try:
            found = os.statvfs(self.folder)
        except OSError as problem:
            raise StoreError(f"{self.folder}: {problem.strerror}") from None
        return found.f_bavail * found.f_frsize

    def used(self) -> int:
        return used_bytes(self.folder)

    @property
    def reserve(self) -> int:
        given = self._disk.reserve
        return default_reserve(self.needs.model) if given is None else given

    def set_needs(self, needs: SpaceNeeds) -> None:
        """Set the needs once the model is known; raises `ConfigError` if the quota is too small."""
        check_quota(self._disk.quota, needs)
        self.needs = needs

    # Updates of peers.

    @contextlib.contextmanager
    def downloading(self, raw_bytes: int) -> Iterator[None]:
        """Wraps the download of an update; raises `DiskFull` if it would use the reserve."""
        if not self._fits(raw_bytes, self.reserve):
            self.release(lambda: self._fits(raw_bytes, self.reserve), False)
        early = bool(self._waiting) or self._now() < self._retry_at
        if early or not self._fits(raw_bytes, self.reserve):
            self._refused = max(self._refused, raw_bytes)
            self.check()
            raise DiskFull(f"{self.folder}: no room for an update of {size_text(raw_bytes)}")
        self._downloading += raw_bytes
        try:
            yield
        except DiskFull as problem:
            # The file system has less space than it reports, for example because of a quota.
            self._failed = raw_bytes, str(problem)
            self._retry_pause_s = min(max(PAUSE_S, 2 * self._retry_pause_s), PAUSE_S_MAX)
            self._retry_at = self._now() + self._retry_pause_s
            self.check()
            raise
        else:
            self._failed, self._retry_pause_s = None, 0.0
        finally:
            self._downloading -= raw_bytes

    # Steps of our own.

    async def retry(
        self,
        what: str,
        step: Callable[[], Awaitable[Result]],
        needed: int = 0,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Result:
        """Run a step until it does not fail for lack of space or file descriptors.

        `meanwhile` is called while it waits.  Without a shortage, only the step itself is awaited.
        """
        token = object()
        pause_s = PAUSE_S
        try:
            while True:
                try:
                    self._claim(what, needed)
                    result = await self.files.retry(step, meanwhile)
                except DiskFull as problem:
                    self._waiting[token] = needed, str(problem)
                    free = self.free()
                    self.release(lambda: self._fits(max(needed, GROWN_BYTES), 0), True)
                    self.check()
                else:
                    break
                await self._pause(pause_s, max(free, needed) + GROWN_BYTES, meanwhile)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
        finally:
            if self._waiting.pop(token, None):
                self.check()
        return result

    async def record(
        self, step: Callable[[], Result], meanwhile: Callable[[], None] = lambda: None
    ) -> Result:
        """Run a step that may write a journal record; retried until there is space."""

        async def write() -> Result:
            return step()

        return await self.retry("a record in the journal", write, meanwhile=meanwhile)

    def _claim(self, what: str, needed: int) -> None:
        """Check before a long step that there is space for its result."""
        if needed and not self._fits(needed, 0):
            self.release(lambda: self._fits(needed, 0), True)
        if needed and not self._fits(needed, 0):
            raise DiskFull(f"{what} needs {size_text(needed)}")

    async def _pause(self, pause_s: float, enough: int, meanwhile: Callable[[], None]) -> None:
        until = self._now() + pause_s
        while self._now() < until and self.free() < enough:
            await asyncio.sleep(POLL_S)
            meanwhile()

    def _fits(self, more: int, reserved: int) -> bool:
        more += self._downloading if reserved else 0
        quota = self._disk.quota
        within = quota is None or self.used() + more <= quota
        return within and self.free() - reserved >= more

    # Shortage.

    async def watch(self) -> None:
        """Check the disk, which other programs also fill; runs until the node stops."""
        while True:
            if self.free() < self.reserve:
                self.release(lambda: self.free() >= self.reserve, False)
            self.check()
            self.files.check()
            await asyncio.sleep(CHECK_S)

    def check(self) -> None:
        """Update `problem`, and notify the listener when a shortage begins or ends."""
        before, self.problem = self.problem, self._shortage(self.problem is not None)
        if self.problem is not None and before is None:
            self._listener.disk_low(self.problem)
        elif self.problem is None and before is not None:
            self._listener.disk_recovered(f"there is room again: {size_text(self.free())} free")

    def _shortage(self, already: bool) -> str | None:
        if self._refused and self._fits(self._refused, self.reserve):
            self._refused = 0
        free, reserve = self.free(), self.reserve
        # Hysteresis: more space is needed to end a shortage than to begin one.
        lacking = free < reserve + (reserve // 8 if already else 0)
        if not (lacking or self._refused or self._failed or self._waiting):
            return None
        short = [*self._waiting.values(), *([self._failed] if self._failed else [])]
        wanted, why = max(short, default=(self._refused, ""))
        quota = self._disk.quota
        if quota is not None and self.used() + max(wanted, 1) > quota:
            return (
                f"{self.folder} holds {size_text(self.used())} and may hold {size_text(quota)}"
                f" (disk.quota), but {size_text(wanted)} more are needed: raise `disk.quota` in"
                " node.yaml and restart, or keep fewer models"
            )
        if why and free >= wanted + reserve:
            return (
                f"{why}, although the file system at {mount_of(self.folder)} has"
                f" {size_text(free)} free: is it another one, a quota of this user, or are there"
                " too many files? (`df -i`)"
            )
        return (
            f"the file system at {mount_of(self.folder)} is too full: {size_text(free)} free,"
            f" {size_text(wanted + reserve)} needed{f' ({why})' if why else ''}: delete or move"
            f" other files there, but nothing below {self.folder}; the node then goes on by itself"
        )


async def open_when_possible(
    folder: Path, make: Callable[[], Result], warn: Callable[[str], None]
) -> Result:
    """Retry what cannot be opened on a full disk; better than a crash loop."""
    pause_s, warned = PAUSE_S, False
    while True:
        try:
            return make()
        except Shortage as problem:
            if not warned:
                warn(_cannot_open(folder, problem))
            warned = True
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_S_MAX)


def _cannot_open(folder: Path, problem: Shortage) -> str:
    if isinstance(problem, TooManyFiles):
        return f"{problem}: close what holds many files, or raise `ulimit -n`; the node then starts"
    return (
        f"the file system at {mount_of(folder)} is full ({problem}): delete or move"
        f" other files there, but nothing below {folder}; the node then starts"
    )


def mount_of(folder: Path) -> Path:
    """The mount point of a folder, or of its first parent that exists."""
    path = folder.absolute()
    while not (path.exists() and os.path.ismount(path)) and path != path.parent:
        path = path.parent
    return path


def used_bytes(folder: Path) -> int:
    """Disk space of a folder's files; files deleted meanwhile count as 0."""
    total = 0
    for inside, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(inside, name)).st_blocks * 512
    return total


def size_text(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
