"""Room on the disk: the arithmetic, what may go and what never, and the waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightyear_node import space as space_module
from lightyear_node.barrier import Cause, Decision, Memory
from lightyear_node.config.site import DiskTerms
from lightyear_node.errors import ConfigError, DiskFull, StoreError
from lightyear_node.records import Digest, Generation, PeerName, Round
from lightyear_node.shelf import drop_leftovers
from lightyear_node.space import Holdings, Needs, Space, expendable, opened

from .test_shelf import B, C, Room

MIB = 1 << 20
NEEDS = Needs(model=2 * MIB, update=MIB, carry=4 * MIB, peers=3, models_kept=2)


class Disk:
    """A disk that has as much free as a test says, and hears what the node tells."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, **terms: int) -> None:
        self.free = 1000 * MIB
        self.used = 0
        self.now = 0.0
        self.told: list[str] = []
        self.asked: list[bool] = []
        monkeypatch.setattr(Space, "free", lambda _: self.free)
        monkeypatch.setattr(Space, "used", lambda _: self.used)
        monkeypatch.setattr(space_module, "POLL_S", 0.001)
        self.space = Space(folder, DiskTerms(**terms), self, now=lambda: self.now)
        self.space.size_up(NEEDS)
        self.space.release = lambda enough, for_ourselves: self.asked.append(for_ourselves)

    def disk_low(self, text: str) -> None:
        self.told.append(text)

    def disk_recovered(self, text: str) -> None:
        self.told.append(text)

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


# -- the arithmetic -------------------------------------------------------------------------------


def test_what_the_rounds_need() -> None:
    # (2 + 2) models, 3 updates and the 2 they are rounded from, 3 of peers, 2 states, the journal.
    assert NEEDS.total == (4 * 2 + 3 * 1 + 2 * 2 + 3 * 1 + 2 * 4 + 8) * MIB
    assert NEEDS.training == (2 + 1 + 4) * MIB
    alike = Needs(model=MIB, update=MIB, peers=1, models_kept=1)
    assert alike.total == (3 + 3 + 1 + 8) * MIB
    assert alike.training == MIB


def test_a_quota_below_that_is_refused_with_the_sum(tmp_path: Path) -> None:
    room = Space(tmp_path, DiskTerms(quota=NEEDS.total), None)  # type: ignore[arg-type]
    room.size_up(NEEDS)
    small = Space(tmp_path, DiskTerms(quota=NEEDS.total - 1), None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"disk.quota is 34.0 MiB.*need 34.0 MiB: 4 models") as c:
        small.size_up(NEEDS)
    assert "3 updates of the others of 1.0 MiB" in str(c.value)
    assert "keep.models" in str(c.value.hint)


def test_two_models_are_left_free_unless_the_operator_says_otherwise(tmp_path: Path) -> None:
    room = Space(tmp_path, DiskTerms(), None)  # type: ignore[arg-type]
    room.size_up(NEEDS)
    assert room.reserve == (16 + 2 * 2) * MIB
    assert Space(tmp_path, DiskTerms(reserve=0), None).reserve == 0  # type: ignore[arg-type]


# -- what may go ----------------------------------------------------------------------------------

DIGESTS = st.sets(st.sampled_from([Digest(letter) for letter in "abcdefgh"]))


@given(received=DIGESTS, parts=DIGESTS, wanted=DIGESTS, needed=DIGESTS, ours=st.booleans())
def test_nothing_is_named_that_is_needed_or_not_of_others(
    received: set[Digest],
    parts: set[Digest],
    wanted: set[Digest],
    needed: set[Digest],
    ours: bool,
) -> None:
    named = expendable(Holdings(received, parts, wanted, needed), for_ourselves=ours)
    assert len(named) == len(set(named))
    assert not set(named) & needed
    assert set(named) <= received | parts
    if not ours:
        assert not set(named) & wanted
    else:
        assert set(named) == (received | parts) - needed
    # What the round could use is always named last.
    useful = [digest in wanted for digest in named]
    assert useful == sorted(useful)


@settings(max_examples=30, deadline=None)
@given(
    wanted=st.sets(st.integers(0, 2)),
    ours=st.booleans(),
    judged=st.sets(st.integers(0, 2)),
    decided=st.sets(st.integers(0, 2)),
)
def test_whatever_is_dropped_the_node_could_be_killed_and_go_on(
    tmp_path_factory: pytest.TempPathFactory,
    wanted: set[int],
    ours: bool,
    judged: set[int],
    decided: set[int],
) -> None:
    """On real files, with nothing ever enough: what is needed is still there."""
    room = Room(tmp_path_factory.mktemp("room"))
    try:
        peers = [PeerName(f"peer-{number}") for number in range(3)]
        updates = [room.receive(peer, 0) for peer in peers]
        own = [room.seal(0), room.seal(1)]
        unsealed = room.file(room.state.updates, "trained, and known to nobody yet")
        room.shelf.use(updates[number] for number in judged)
        accepted = tuple(updates[number] for number in decided)
        decision = Decision(Round(1), Cause.ALL, "", accepted, ())
        room.ledger.decide(decision, Memory(Generation(0), Round(1), decision=decision), {})
        kept = frozenset(updates[number].digest for number in wanted)
        room.shelf.make_room(kept, lambda: False, for_ourselves=ours)
        needed = [*own, unsealed, *(updates[number].digest for number in judged | decided)]
        assert all(room.has(*needed))
        assert ours or all(room.has(*kept))
        spare = set(range(3)) - judged - decided - (set() if ours else wanted)
        assert not any(room.has(*(updates[number].digest for number in spare)))
        assert room.shelf.check() == []
    finally:
        room.state.close()


def test_no_more_goes_than_is_enough(tmp_path: Path) -> None:
    room = Room(tmp_path)
    room.seal(0)
    updates = [room.receive(B, 0), room.receive(C, 0)]
    room.shelf.make_room(frozenset(), lambda: True, for_ourselves=True)
    assert room.has(*(update.digest for update in updates)) == [True, True]
    answers = iter([False, True, True])
    room.shelf.make_room(frozenset(), lambda: next(answers), for_ourselves=True)
    assert sorted(room.has(*(update.digest for update in updates))) == [False, True]


def test_what_an_earlier_life_left_may_go_before_this_one_begins(tmp_path: Path) -> None:
    room = Room(tmp_path)
    own = room.seal(0)
    model = room.ledger.model
    room.ledger._append("start", {}, 0, {"models": [model]})
    received = room.receive(B, 0)
    old_model = room.file(room.state.models, "of an old round")
    room.state.models._adopted.clear()
    first = room.file(room.state.models, "written in this life, and not yet recorded")
    drop_leftovers(room.state)
    assert room.has(own, received.digest) == [True, False]
    assert room.state.models.whole() == {model, first}
    assert old_model not in room.state.models.whole()
    assert room.shelf.check() == []


def test_a_life_knows_what_the_one_before_has_received(tmp_path: Path) -> None:
    before = Room(tmp_path)
    own, received = before.seal(0), before.receive(B, 0)
    before.state.close()
    room = Room(tmp_path)
    room.shelf.make_room(frozenset(), lambda: False, for_ourselves=False)
    assert room.has(own, received.digest) == [True, False]


def test_the_first_sound_model_is_found(tmp_path: Path) -> None:
    room = Room(tmp_path)
    models = [room.file(room.state.models, f"model {number}") for number in range(3)]
    room.ledger.models = models
    assert room.shelf.check() == []
    room.state.models.path(models[0]).write_text("damaged")
    room.state.models.path(models[1]).unlink()
    assert room.shelf.check() == models[:2]
    room.state.models.path(models[2]).write_text("damaged")
    with pytest.raises(StoreError, match="is missing or damaged"):
        room.shelf.check()


# -- what others want to put there ----------------------------------------------------------------


def test_the_reserve_is_not_for_others(disk: Disk) -> None:
    disk.free = 12 * MIB
    # The first two are on their way, and not yet on the disk.
    coming = disk.space.coming
    with coming(MIB), coming(MIB), pytest.raises(DiskFull), coming(MIB):
        pass
    assert disk.asked == [False]
    assert len(disk.told) == 1
    assert disk.space.problem is not None
    disk.space.look()
    assert disk.space.problem is None, "what was promised has not come: there is room"


def test_a_quota_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    disk = Disk(monkeypatch, tmp_path, quota=100 * MIB)
    disk.used = 99 * MIB
    with disk.space.coming(MIB):
        pass
    disk.used += 1
    with pytest.raises(DiskFull), disk.space.coming(MIB):
        pass
    [told] = disk.told
    assert "may hold 100.0 MiB (disk.quota), but 1.0 MiB more are needed" in told
    assert "raise `disk.quota`" in told


def test_a_disk_that_has_less_than_it_says_is_not_asked_all_the_time(disk: Disk) -> None:
    def attempt() -> None:
        with disk.space.coming(MIB):
            raise DiskFull("updates/x: Disk quota exceeded")

    with pytest.raises(DiskFull, match="quota exceeded"):
        attempt()
    with pytest.raises(DiskFull, match="no room"):
        attempt()
    disk.pass_time()
    with pytest.raises(DiskFull, match="quota exceeded"):
        attempt()
    [told] = disk.told
    assert "quota exceeded, although" in told
    disk.pass_time()
    with disk.space.coming(MIB):
        pass
    disk.space.look()
    assert disk.space.problem is None
    assert len(disk.told) == 2


# -- what we have to put there ourselves ----------------------------------------------------------


def test_a_step_of_our_own_is_done_as_soon_as_it_can_be(disk: Disk) -> None:
    disk.free = MIB
    heard: list[str | None] = []

    def meanwhile() -> None:
        heard.append(disk.space.problem)
        disk.pass_time()
        disk.free = 100 * MIB

    step = failing(3, DiskFull("journal.db: full"))
    assert asyncio.run(disk.space.through("a record", step, meanwhile=meanwhile)) == "done"
    assert len(heard) == 3
    assert disk.asked == [True, True, True], "others' files go first"
    low, again = disk.told
    assert f"the file system at {space_module.mount_of(disk.space.folder)} is too full" in low
    assert "1.0 MiB free, 10.0 MiB needed (journal.db: full)" in low
    assert f"nothing below {disk.space.folder}" in low
    assert again == "there is room again: 100.0 MiB free"


def test_nothing_is_tried_that_has_no_room(disk: Disk) -> None:
    """Or hours of training would be lost for want of a place to write them to."""
    disk.free = MIB
    tried: list[int] = []

    async def train() -> str:
        tried.append(disk.free)
        return "trained"

    def meanwhile() -> None:
        disk.free += MIB
        disk.pass_time()

    assert asyncio.run(disk.space.through("training", train, 4 * MIB, meanwhile)) == "trained"
    assert tried == [4 * MIB]
    assert "training needs 4.0 MiB" in disk.told[0]


def test_the_pause_ends_when_somebody_has_made_room(disk: Disk) -> None:
    disk.free = 0

    def meanwhile() -> None:
        disk.free = 50 * MIB  # and no time passes

    step = failing(1, DiskFull("full"))
    assert asyncio.run(disk.space.through("a record", step, meanwhile=meanwhile)) == "done"


def test_while_we_wait_nothing_is_fetched(disk: Disk) -> None:
    def meanwhile() -> None:
        disk.pass_time()
        with pytest.raises(DiskFull), disk.space.coming(1):
            pass

    step = failing(1, DiskFull("full"))
    asyncio.run(disk.space.through("a record", step, meanwhile=meanwhile))
    with disk.space.coming(1):
        pass


@pytest.mark.parametrize("problem", [StoreError("Input/output error"), RuntimeError("bug")])
def test_nothing_else_is_tried_again(disk: Disk, problem: Exception) -> None:
    with pytest.raises(type(problem)):
        asyncio.run(disk.space.through("a record", failing(1, problem)))
    assert disk.told == []


def test_it_is_said_once_and_not_for_every_byte(disk: Disk) -> None:
    for free in (11, 9, 8, 9, 10, 11):
        disk.free = free * MIB
        disk.space.look()
    assert len(disk.told) == 1, "a little more must be free to end it than began it"
    disk.free = 12 * MIB
    disk.space.look()
    disk.space.look()
    assert len(disk.told) == 2


def test_what_cannot_be_opened_yet_is_opened_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(space_module, "PAUSE_S", 0.001)
    problems = [DiskFull("LOCK: full"), DiskFull("LOCK: full")]
    told: list[str] = []

    def make() -> str:
        if problems:
            raise problems.pop()
        return "opened"

    assert asyncio.run(opened(tmp_path / "state", make, told.append)) == "opened"
    [text] = told
    assert "is full (LOCK: full)" in text


def test_bytes_in_use_are_those_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "one").write_bytes(b"x" * 100_000)
    (tmp_path / "journal.db").write_bytes(b"x" * 50_000)
    used = space_module.used_bytes(tmp_path)
    assert 150_000 <= used < 300_000
