"""Room on the disk: how much there is, how much is needed, and what happens where it is not there.

Owns the arithmetic of quota and reserve, which of the others' files may go and in what order, and
the waiting: a step of our own that finds the disk full is tried again until it succeeds, while all
else goes on.  Must not know rounds, nor delete anything itself: who has the files is asked to.
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

from lightyear_node.config.site import DiskTerms
from lightyear_node.errors import ConfigError, DiskFull, StoreError
from lightyear_node.records import Digest

JOURNAL_BYTES = 8 << 20
"""For the journal's log, which is folded into it every four MiB, and for its growth."""
RESERVE_BYTES = 16 << 20
RESERVE_MODELS = 2
"""What is left free where the operator does not say how much: so many models, and some MiB."""
PAUSE_S = 1.0
PAUSE_S_MAX = 30.0
LOOK_S = 1.0
POLL_S = 0.2
GROWN_BYTES = 1 << 20
"""So much more free space than at the last attempt is worth another one at once."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Needs:
    """What a site's rounds take on its disk, in bytes."""

    model: int = 0
    """One model as it is kept here."""
    update: int = 0
    """One update as it travels."""
    carry: int = 0
    """The optimizer's state, as far as it is known."""
    peers: int = 0
    models_kept: int = 1

    @property
    def training(self) -> int:
        """What one training writes."""
        return self.model + self.carry + (self.update if self._rounded else 0)

    @property
    def total(self) -> int:
        return sum(count * size for count, size, _ in self._parts()) + JOURNAL_BYTES

    def __str__(self) -> str:
        parts = [f"{count} {what} of {size_text(size)}" for count, size, what in self._parts()]
        return f"{', '.join(parts)}, and {size_text(JOURNAL_BYTES)} for the journal"

    @property
    def _rounded(self) -> bool:
        """Whether the update is another file than the model that was trained."""
        return self.update != self.model

    def _parts(self) -> Iterator[tuple[int, int, str]]:
        yield self.models_kept + 2, self.model, "models (the last, the best and the next)"
        # Those on offer are two, and the next one is written beside them.
        yield 3, self.update, "updates of ours"
        if self._rounded:
            yield 2, self.model, "trained models, of which the updates are rounded copies"
        yield self.peers, self.update, "updates of the others"
        if self.carry:
            yield 2, self.carry, "states of the optimizer"


def default_reserve(model_bytes: int) -> int:
    return RESERVE_BYTES + RESERVE_MODELS * model_bytes


def check_quota(quota: int | None, needs: Needs) -> None:
    if quota is None or quota >= needs.total:
        return
    raise ConfigError(
        f"disk.quota is {size_text(quota)}, but this site's rounds need {size_text(needs.total)}:"
        f" {needs}",
        hint="raise `disk.quota` in node.yaml, or keep fewer models (`keep.models`)",
    )


@dataclass(frozen=True, slots=True)
class Holdings:
    """The folder of updates, by who needs what."""

    received: Set[Digest]
    """Whole updates that came from others."""
    parts: Set[Digest]
    """Updates of which a piece has come."""
    wanted: Set[Digest]
    """What the round could still use."""
    needed: Set[Digest]
    """Our own, those being judged or merged, and those just arriving: never to be named."""


def expendable(holdings: Holdings, *, for_ourselves: bool) -> list[Digest]:
    """What may go, that which is missed least first.

    Without pieces of old updates, and without those that only shorten the next transfer, a round
    goes on as before.  Only where a step of our own has no room do others' updates go that the
    round would have used; they are fetched again.
    """
    parts = holdings.parts - holdings.needed
    whole = holdings.received - holdings.needed
    order = [parts - holdings.wanted, whole - holdings.wanted]
    if for_ourselves:
        order += [parts & holdings.wanted, whole & holdings.wanted]
    named: dict[Digest, None] = {}
    for group in order:
        named |= dict.fromkeys(sorted(group))
    return list(named)


class Tell(Protocol):
    """Who hears of it: once when the disk is too full, once when that is over."""

    def disk_low(self, text: str) -> None: ...

    def disk_recovered(self, text: str) -> None: ...


Release = Callable[[Callable[[], bool], bool], None]
"""Delete what may go until the first argument says that it is enough; the second says whether it
is for a step of our own."""


class Space:
    """To be used within one event loop; `problem` and `free` may be asked from any thread."""

    def __init__(
        self,
        folder: Path,
        disk: DiskTerms,
        tell: Tell,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.needs = Needs()
        self.problem: str | None = None
        """What is wrong and what to do about it, while something is."""
        self.release: Release = lambda enough, for_ourselves: None
        self._disk = disk
        self._tell = tell
        self._now = now
        self._promised = 0
        self._refused = 0
        self._failed: tuple[int, str] | None = None
        self._retry_at = 0.0
        self._retry_pause_s = 0.0
        self._waiting: dict[object, tuple[int, str]] = {}

    # How much there is.

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

    def size_up(self, needs: Needs) -> None:
        """Once the model is known.  A quota that no round could live with is refused."""
        check_quota(self._disk.quota, needs)
        self.needs = needs

    # What others want to put there.

    @contextlib.contextmanager
    def coming(self, raw_bytes: int) -> Iterator[None]:
        """Around the transfer of an update; raises if it would take what is reserved."""
        if not self._fits(raw_bytes, self.reserve):
            self.release(lambda: self._fits(raw_bytes, self.reserve), False)
        early = bool(self._waiting) or self._now() < self._retry_at
        if early or not self._fits(raw_bytes, self.reserve):
            self._refused = max(self._refused, raw_bytes)
            self.look()
            raise DiskFull(f"{self.folder}: no room for an update of {size_text(raw_bytes)}")
        self._promised += raw_bytes
        try:
            yield
        except DiskFull as problem:
            # The file system has less room than it says, such as under a quota of its own.
            self._failed = raw_bytes, str(problem)
            self._retry_pause_s = min(max(PAUSE_S, 2 * self._retry_pause_s), PAUSE_S_MAX)
            self._retry_at = self._now() + self._retry_pause_s
            self.look()
            raise
        else:
            self._failed, self._retry_pause_s = None, 0.0
        finally:
            self._promised -= raw_bytes

    # What we have to put there ourselves.

    async def through(
        self,
        what: str,
        step: Callable[[], Awaitable[Result]],
        needed: int = 0,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Result:
        """Do a step of our own, as often as it takes; `meanwhile` is called while it waits.

        Nothing is awaited that the step does not await, unless the disk is full.
        """
        token = object()
        pause_s = PAUSE_S
        try:
            while True:
                try:
                    self._claim(what, needed)
                    result = await step()
                except DiskFull as problem:
                    self._waiting[token] = needed, str(problem)
                    free = self.free()
                    self.release(lambda: self._fits(max(needed, GROWN_BYTES), 0), True)
                    self.look()
                else:
                    break
                await self._pause(pause_s, max(free, needed) + GROWN_BYTES, meanwhile)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
        finally:
            if self._waiting.pop(token, None):
                self.look()
        return result

    async def record(
        self, step: Callable[[], None], meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Do what may have to be recorded, as soon as there is room for the record."""

        async def write() -> None:
            step()

        await self.through("a record in the journal", write, meanwhile=meanwhile)

    def _claim(self, what: str, needed: int) -> None:
        """Before hours of training rather than after: its result must have room."""
        if needed and not self._fits(needed, 0):
            self.release(lambda: self._fits(needed, 0), True)
        if needed and not self._fits(needed, 0):
            raise DiskFull(f"{what} needs {size_text(needed)}")

    async def _pause(self, pause_s: float, enough: int, meanwhile: Callable[[], None]) -> None:
        until = self._now() + pause_s
        while self._now() < until and self.free() < enough:
            await asyncio.sleep(POLL_S)
            meanwhile()

    def _fits(self, more: int, spared: int) -> bool:
        more += self._promised if spared else 0
        quota = self._disk.quota
        within = quota is None or self.used() + more <= quota
        return within and self.free() - spared >= more

    # Being short of it.

    async def watch(self) -> None:
        """Notice what other programs do to the disk; ends only with the node."""
        while True:
            if self.free() < self.reserve:
                self.release(lambda: self.free() >= self.reserve, False)
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Say when the disk begins to be too full, and when it no longer is."""
        before, self.problem = self.problem, self._shortage(self.problem is not None)
        if self.problem is not None and before is None:
            self._tell.disk_low(self.problem)
        elif self.problem is None and before is not None:
            self._tell.disk_recovered(f"there is room again: {size_text(self.free())} free")

    def _shortage(self, already: bool) -> str | None:
        if self._refused and self._fits(self._refused, self.reserve):
            self._refused = 0
        free, reserve = self.free(), self.reserve
        # A little more to end it than to begin it, or every file would do one or the other.
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


async def opened(folder: Path, make: Callable[[], Result], warn: Callable[[str], None]) -> Result:
    """What cannot even be opened on a full disk, as soon as it can: waiting beats a crash loop."""
    pause_s, told = PAUSE_S, False
    while True:
        try:
            return make()
        except DiskFull as problem:
            if not told:
                warn(
                    f"the file system at {mount_of(folder)} is full ({problem}): delete or move"
                    f" other files there, but nothing below {folder}; the node then starts"
                )
            told = True
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_S_MAX)


def mount_of(folder: Path) -> Path:
    """Where the file system begins that a folder, or the first one above it that exists, is on."""
    path = folder.absolute()
    while not (path.exists() and os.path.ismount(path)) and path != path.parent:
        path = path.parent
    return path


def used_bytes(folder: Path) -> int:
    """What a folder's files take on the disk; those that vanish meanwhile take nothing."""
    total = 0
    for inside, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(inside, name)).st_blocks * 512
    return total


def size_text(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
