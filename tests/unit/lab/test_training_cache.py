"""Results of training on disk: found again whole, or not at all."""

from __future__ import annotations

import os
from collections import namedtuple
from pathlib import Path

import pytest

from lightyear_node.lab.training_cache import (
    FREE_BYTES_MIN,
    CachedTraining,
    TrainingCache,
    remove_unfinished,
)
from lightyear_node.types import Digest

KEY = Digest("a" * 64)
OTHER = Digest("b" * 64)
RESULT = CachedTraining(samples=5, metrics={"loss": 0.1, "dice": float("inf")}, generator="00ff")
MODEL, STATE = b"model" * 500, b"state"
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def files(tmp_path: Path, name: str) -> tuple[Path, Path]:
    return tmp_path / f"{name}-own", tmp_path / f"{name}-carry"


def stored(cache: TrainingCache, tmp_path: Path, *keys: Digest, size: int = len(MODEL)) -> None:
    own, carry = files(tmp_path, "trained")
    own.write_bytes(MODEL[:1] * size if size != len(MODEL) else MODEL)
    carry.write_bytes(STATE)
    for number, key in enumerate(keys):
        cache.store(key, own, carry, RESULT)
        if (entry := tmp_path / "cache" / key).exists():
            os.utime(entry, ns=(number, number))  # older than any entry that is used later


def fetched(cache: TrainingCache, tmp_path: Path, key: Digest = KEY) -> CachedTraining | None:
    return cache.fetch(key, *files(tmp_path, "found"))


def test_an_entry_is_found_again(folder: Path, tmp_path: Path) -> None:
    cache = TrainingCache(folder, 1 << 20)
    assert fetched(cache, tmp_path) is None
    stored(cache, tmp_path, KEY)
    own, carry = files(tmp_path, "found")
    own.write_bytes(b"of the round before")
    with own.open("rb") as held:
        assert fetched(TrainingCache(folder, 1 << 20), tmp_path) == RESULT
        # The old content stays, because models may be mapped from it.
        assert held.read() == b"of the round before"
    assert (own.read_bytes(), carry.read_bytes()) == (MODEL, STATE)
    assert fetched(cache, tmp_path, OTHER) is None
    assert (cache.hits, len(list(folder.iterdir()))) == (0, 1)


def test_a_job_that_uses_an_entry_cannot_change_it(folder: Path, tmp_path: Path) -> None:
    cache = TrainingCache(folder, 1 << 20)
    stored(cache, tmp_path, KEY)
    for name in ("trained", "found"):
        for path in files(tmp_path, name):
            path.write_bytes(b"changed in place")
        assert fetched(cache, tmp_path) == RESULT
    assert files(tmp_path, "found")[0].read_bytes() == MODEL
    assert cache.hits == 2


def damaged(whole: bytes) -> dict[str, bytes]:
    middle = len(whole) // 2
    return {
        "empty": b"",
        "cut in the digest": whole[:10],
        "cut in the header": whole[:60],
        "cut in the model": whole[:middle],
        "cut at the end": whole[:-1],
        "longer": whole + b"x",
        "changed digest": b"x" + whole[1:],
        "changed metrics": whole.replace(b"0.1", b"0.2", 1),
        "changed model": whole[:middle] + b"x" + whole[middle + 1 :],
        "no header": whole[:32] + b"[]\n",
        "another header": whole[:32] + b"{}\n",
        "zeros": bytes(len(whole)),
    }


def test_a_damaged_entry_is_deleted_and_counts_as_missing(folder: Path, tmp_path: Path) -> None:
    cache = TrainingCache(folder, 1 << 20)
    stored(cache, tmp_path, KEY)
    entry = folder / KEY
    whole = entry.read_bytes()
    for what, content in damaged(whole).items():
        assert content != whole, what
        entry.write_bytes(content)
        assert fetched(cache, tmp_path) is None, what
        assert not entry.exists(), what
        assert not any(path.exists() for path in files(tmp_path, "found")), what
    stored(cache, tmp_path, KEY)
    assert fetched(cache, tmp_path) == RESULT


def test_the_least_recently_used_entries_make_room(folder: Path, tmp_path: Path) -> None:
    cache = TrainingCache(folder, 10_000)
    keys = [Digest(f"{number}" * 64) for number in range(4)]
    stored(cache, tmp_path, *keys[:3])
    assert fetched(cache, tmp_path, keys[0]) == RESULT
    stored(cache, tmp_path, keys[3])
    left = {path.name for path in folder.iterdir()}
    assert left == {keys[0], keys[2], keys[3]}
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 10_000
    stored(cache, tmp_path, OTHER, size=20_000)  # larger than the whole cache
    assert not (folder / OTHER).exists()
    assert fetched(cache, tmp_path, keys[0]) == RESULT


def test_a_limit_of_zero_stores_nothing(folder: Path, tmp_path: Path) -> None:
    cache = TrainingCache(folder, 0)
    stored(cache, tmp_path, KEY)
    assert fetched(cache, tmp_path) is None


def test_free_space_is_left_for_others(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(TrainingCache(folder, 1 << 20), tmp_path, KEY)
    usage = Usage(0, 0, FREE_BYTES_MIN + 1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    cache = TrainingCache(folder, 1 << 20)
    stored(cache, tmp_path, OTHER)  # takes the place of the first
    assert {path.name for path in folder.iterdir()} == {OTHER}
    usage = Usage(0, 0, FREE_BYTES_MIN - 10_000)
    stored(TrainingCache(folder, 1 << 20), tmp_path, KEY)
    assert list(folder.iterdir()) == []


def test_a_full_disk_is_no_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = TrainingCache(folder, 1 << 20)
    stored(cache, tmp_path, KEY)

    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        stored(cache, tmp_path, OTHER)
        assert fetched(cache, tmp_path) is None
    assert [path.name for path in folder.iterdir()] == [KEY]
    assert fetched(cache, tmp_path) == RESULT
    folder_in_the_way = tmp_path / "file"
    folder_in_the_way.write_text("")
    stored(TrainingCache(folder_in_the_way, 1 << 20), tmp_path, KEY)


def test_files_of_killed_processes_are_removed(folder: Path, tmp_path: Path) -> None:
    stored(TrainingCache(folder, 1 << 20), tmp_path, KEY)
    (folder / f"{OTHER}.77.part").write_bytes(b"half")
    remove_unfinished(folder)
    assert [path.name for path in folder.iterdir()] == [KEY]
    remove_unfinished(tmp_path / "missing")
