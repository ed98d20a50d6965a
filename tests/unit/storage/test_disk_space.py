"""Disk space: needs, which updates are deleted, and retries."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightyear_node.config.node import DiskConfig
from lightyear_node.errors import ConfigError, DiskFull, StoreError
from lightyear_node.node.retention import drop_leftovers
from lightyear_node.protocol.durable_state import Decision, DurableState
from lightyear_node.protocol.parameters import Cause
from lightyear_node.storage import disk_space as space_module
from lightyear_node.storage.disk_space import (
    DiskSpace,
    SpaceNeeds,
    expendable,
    open_when_possible,
)
from lightyear_node.storage.state_directory import StateDirectory
from lightyear_node.types import Digest, Generation, PeerName, Round
from tests.unit.node.test_retention import B, C, Room

MIB = 1 << 20
NEEDS = SpaceNeeds(model=2 * MIB, update=MIB, carry=4 * MIB, peers=3, models_kept=2)


class Disk:
    """A fake disk with adjustable free space; also the listener."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, **settings: int) -> None:
        self.free = 1000 * MIB
        self.used = 0
        self.now = 0.0
        self.reports: list[str] = []
        self.asked: list[bool] = []
        monkeypatch.setattr(DiskSpace, "free", lambda _: self.free)
        monkeypatch.setattr(DiskSpace, "used", lambda _: self.used)
        monkeypatch.setattr(space_module, "POLL_S", 0.001)
        self.space = DiskSpace(folder, DiskConfig(**settings), self, now=lambda: self.now)
        self.space.set_needs(NEEDS)
        self.space.release = lambda enough, for_ourselves: self.asked.append(for_ourselves)

    def disk_low(self, text: str) -> None:
        self.reports.append(text)

    def disk_recovered(self, text: str) -> None:
        self.reports.append(text)

    def pass_time(self) -> None:
        """So that no pause of the node takes any."""
        self.now += 60.0


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Disk:
    return Disk(monkeypatch, tmp_path, reserve=10 * MIB)


def failing(times: int, problem: Exception) -> Callable[[], Awaitable[str]]:
    left = [problem] * times

    async def step() -> str:
        if left:
            raise left.pop()
        return "done"

    return step


# -- needs ----------------------------------------------------------------------------------------


def test_needs_of_a_sites_rounds() -> None:
    # (2 + 2) models, 3 updates and the 2 they are rounded from, 3 of peers, 2 states, the journal.
    assert NEEDS.total == (4 * 2 + 3 * 1 + 2 * 2 + 3 * 1 + 2 * 4 + 8) * MIB
    assert NEEDS.training == (2 + 1 + 4) * MIB
    alike = SpaceNeeds(model=MIB, update=MIB, peers=1, models_kept=1)
    assert alike.total == (3 + 3 + 1 + 8) * MIB
    assert alike.training == MIB


def test_a_quota_below_that_is_refused_with_the_sum(tmp_path: Path) -> None:
    room = DiskSpace(tmp_path, DiskConfig(quota=NEEDS.total), None)  # type: ignore[arg-type]
    room.set_needs(NEEDS)
    small = DiskSpace(tmp_path, DiskConfig(quota=NEEDS.total - 1), None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"disk.quota is 34.0 MiB.*need 34.0 MiB: 4 models") as c:
        small.set_needs(NEEDS)
    assert "3 updates of the others of 1.0 MiB" in str(c.value)
    assert "keep.models" in str(c.value.hint)


def test_the_default_reserve_is_two_models(tmp_path: Path) -> None:
    room = DiskSpace(tmp_path, DiskConfig(), None)  # type: ignore[arg-type]
    room.set_needs(NEEDS)
    assert room.reserve == (16 + 2 * 2) * MIB
    assert DiskSpace(tmp_path, DiskConfig(reserve=0), None).reserve == 0  # type: ignore[arg-type]


# -- expendable updates ---------------------------------------------------------------------------

DIGESTS = st.sets(st.sampled_from([Digest(letter) for letter in "abcdefgh"]))


@given(received=DIGESTS, parts=DIGESTS, wanted=DIGESTS, needed=DIGESTS, ours=st.booleans())
def test_only_updates_of_peers_that_are_not_needed_are_expendable(
    received: set[Digest],
    parts: set[Digest],
    wanted: set[Digest],
    needed: set[Digest],
    ours: bool,
) -> None:
    named = expendable(
        received=received, parts=parts, wanted=wanted, needed=needed, for_ourselves=ours
    )
    assert len(named) == len(set(named))
    assert not set(named) & needed
    assert set(named) <= received | parts
    if not ours:
        assert not set(named) & wanted
    else:
        assert set(named) == (received | parts) - needed
    # Updates that the round could use always come last.
    useful = [digest in wanted for digest in named]
    assert useful == sorted(useful)


@settings(max_examples=30, deadline=None)
@given(
    wanted=st.sets(st.integers(0, 2)),
    ours=st.booleans(),
    judged=st.sets(st.integers(0, 2)),
    decided=st.sets(st.integers(0, 2)),
)
def test_a_restart_succeeds_whatever_was_deleted(
    tmp_path_factory: pytest.TempPathFactory,
    wanted: set[int],
    ours: bool,
    judged: set[int],
    decided: set[int],
) -> None:
    """On real files, with no limit to the deletion: all needed files stay."""
    room = Room(tmp_path_factory.mktemp("room"))
    try:
        peers = [PeerName(f"peer-{number}") for number in range(3)]
        updates = [room.receive(peer, 0) for peer in peers]
        own = [room.seal(0), room.seal(1)]
        unsealed = room.file(room.state.updates, "trained, and not announced yet")
        room.retention.use(updates[number] for number in judged)
        accepted = tuple(updates[number] for number in decided)
        decision = Decision(Round(1), Cause.ALL, "", accepted, ())
        room.round_journal.decide(
            decision, DurableState(Generation(0), Round(1), decision=decision), {}
        )
        kept = frozenset(updates[number].digest for number in wanted)
        room.retention.make_room(kept, lambda: False, for_ourselves=ours)
        needed = [*own, unsealed, *(updates[number].digest for number in judged | decided)]
        assert all(room.has(*needed))
        assert ours or all(room.has(*kept))
        spare = set(range(3)) - judged - decided - (set() if ours else wanted)
        assert not any(room.has(*(updates[number].digest for number in spare)))
        assert room.retention.check() == []
    finally:
        room.state.close()


def test_no_more_is_deleted_than_necessary(tmp_path: Path) -> None:
    room = Room(tmp_path)
    room.seal(0)
    updates = [room.receive(B, 0), room.receive(C, 0)]
    room.retention.make_room(frozenset(), lambda: True, for_ourselves=True)
    assert room.has(*(update.digest for update in updates)) == [True, True]
    answers = iter([False, True, True])
    room.retention.make_room(frozenset(), lambda: next(answers), for_ourselves=True)
    assert sorted(room.has(*(update.digest for update in updates))) == [False, True]


def test_leftovers_of_an_earlier_process_can_be_deleted_at_start(tmp_path: Path) -> None:
    room = Room(tmp_path)
    own = room.seal(0)
    model = room.round_journal.model
    room.round_journal.start(schema=Digest("5" * 64), initial_model=model, rule="local", about={})
    received = room.receive(B, 0)
    old_model = room.file(room.state.models, "of an old round")
    room.state.close()
    room.state = StateDirectory(tmp_path)  # as the next process opens it
    first = room.file(room.state.models, "written by this process, and not yet recorded")
    drop_leftovers(room.state)
    assert room.has(own, received.digest) == [True, False]
    assert room.state.models.complete_files() == {model, first}
    assert old_model not in room.state.models.complete_files()
    assert room.retention.check() == []


def test_a_restarted_node_knows_the_updates_received_before(tmp_path: Path) -> None:
    before = Room(tmp_path)
    own, received = before.seal(0), before.receive(B, 0)
    before.state.close()
    room = Room(tmp_path)
    room.retention.make_room(frozenset(), lambda: False, for_ourselves=False)
    assert room.has(own, received.digest) == [True, False]


def test_the_newest_intact_model_is_found(tmp_path: Path) -> None:
    room = Room(tmp_path)
    models = [room.file(room.state.models, f"model {number}") for number in range(3)]
    room.round_journal.models = models
    assert room.retention.check() == []
    room.state.models.path(models[0]).write_text("damaged")
    room.state.models.path(models[1]).unlink()
    assert room.retention.check() == models[:2]
    room.state.models.path(models[2]).write_text("damaged")
    with pytest.raises(StoreError, match="is missing or damaged"):
        room.retention.check()


# -- updates of peers -----------------------------------------------------------------------------


def test_updates_of_peers_do_not_use_the_reserve(disk: Disk) -> None:
    disk.free = 12 * MIB
    # The first two are being downloaded, and not on the disk yet.
    coming = disk.space.downloading
    with coming(MIB), coming(MIB), pytest.raises(DiskFull), coming(MIB):
        pass
    assert disk.asked == [False]
    assert len(disk.reports) == 1
    assert disk.space.problem is not None
    disk.space.check()
    assert disk.space.problem is None, "what was promised has not come: there is room"


def test_the_quota_is_not_exceeded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    disk = Disk(monkeypatch, tmp_path, quota=100 * MIB)
    disk.used = 99 * MIB
    with disk.space.downloading(MIB):
        pass
    disk.used += 1
    with pytest.raises(DiskFull), disk.space.downloading(MIB):
        pass
    [report] = disk.reports
    assert "may hold 100.0 MiB (disk.quota), but 1.0 MiB more are needed" in report
    assert "raise `disk.quota`" in report


def test_a_disk_that_fails_despite_free_space_is_retried_with_backoff(disk: Disk) -> None:
    def attempt() -> None:
        with disk.space.downloading(MIB):
            raise DiskFull("updates/x: Disk quota exceeded")

    with pytest.raises(DiskFull, match="quota exceeded"):
        attempt()
    with pytest.raises(DiskFull, match="no room"):
        attempt()
    disk.pass_time()
    with pytest.raises(DiskFull, match="quota exceeded"):
        attempt()
    [report] = disk.reports
    assert "quota exceeded, although" in report
    disk.pass_time()
    with disk.space.downloading(MIB):
        pass
    disk.space.check()
    assert disk.space.problem is None
    assert len(disk.reports) == 2


# -- steps of our own -----------------------------------------------------------------------------


def test_a_step_of_our_own_is_retried_until_it_succeeds(disk: Disk) -> None:
    disk.free = MIB
    heard: list[str | None] = []

    def meanwhile() -> None:
        heard.append(disk.space.problem)
        disk.pass_time()
        disk.free = 100 * MIB

    step = failing(3, DiskFull("journal.db: full"))
    assert asyncio.run(disk.space.retry("a record", step, meanwhile=meanwhile)) == "done"
    assert len(heard) == 3
    assert disk.asked == [True, True, True], "others' files go first"
    low, again = disk.reports
    assert f"the file system at {space_module.mount_of(disk.space.folder)} is too full" in low
    assert "1.0 MiB free, 10.0 MiB needed (journal.db: full)" in low
    assert f"nothing below {disk.space.folder}" in low
    assert again == "there is room again: 100.0 MiB free"


def test_a_step_without_enough_space_is_not_started(disk: Disk) -> None:
    """Otherwise hours of training would be lost when the result cannot be written."""
    disk.free = MIB
    tried: list[int] = []

    async def train() -> str:
        tried.append(disk.free)
        return "trained"

    def meanwhile() -> None:
        disk.free += MIB
        disk.pass_time()

    assert asyncio.run(disk.space.retry("training", train, 4 * MIB, meanwhile)) == "trained"
    assert tried == [4 * MIB]
    assert "training needs 4.0 MiB" in disk.reports[0]


def test_the_pause_ends_when_space_was_freed(disk: Disk) -> None:
    disk.free = 0

    def meanwhile() -> None:
        disk.free = 50 * MIB  # and no time passes

    step = failing(1, DiskFull("full"))
    assert asyncio.run(disk.space.retry("a record", step, meanwhile=meanwhile)) == "done"


def test_nothing_is_fetched_while_a_step_of_our_own_waits(disk: Disk) -> None:
    def meanwhile() -> None:
        disk.pass_time()
        with pytest.raises(DiskFull), disk.space.downloading(1):
            pass

    step = failing(1, DiskFull("full"))
    asyncio.run(disk.space.retry("a record", step, meanwhile=meanwhile))
    with disk.space.downloading(1):
        pass


@pytest.mark.parametrize("problem", [StoreError("Input/output error"), RuntimeError("bug")])
def test_other_errors_are_not_retried(disk: Disk, problem: Exception) -> None:
    with pytest.raises(type(problem)):
        asyncio.run(disk.space.retry("a record", failing(1, problem)))
    assert disk.reports == []


def test_a_shortage_is_reported_once(disk: Disk) -> None:
    for free in (11, 9, 8, 9, 10, 11):
        disk.free = free * MIB
        disk.space.check()
    assert len(disk.reports) == 1, "a little more must be free to end it than began it"
    disk.free = 12 * MIB
    disk.space.check()
    disk.space.check()
    assert len(disk.reports) == 2


def test_opening_is_retried_until_there_is_space(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(space_module, "PAUSE_S", 0.001)
    problems = [DiskFull("LOCK: full"), DiskFull("LOCK: full")]
    reports: list[str] = []

    def make() -> str:
        if problems:
            raise problems.pop()
        return "opened"

    assert asyncio.run(open_when_possible(tmp_path / "state", make, reports.append)) == "opened"
    [text] = reports
    assert "is full (LOCK: full)" in text


def test_bytes_in_use_are_those_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "one").write_bytes(b"x" * 100_000)
    (tmp_path / "journal.db").write_bytes(b"x" * 50_000)
    used = space_module.used_bytes(tmp_path)
    assert 150_000 <= used < 300_000
