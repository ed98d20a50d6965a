"""Files are replaced whole: a failed write leaves the old content and no temporary file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lightyear_node.storage import atomic_files
from lightyear_node.storage.atomic_files import (
    UnsyncedRename,
    rename_durably,
    staged,
    staged_directory,
    write_file,
)


class Crash(Exception):
    pass


@pytest.mark.parametrize("durable", [False, True])
def test_write_file_replaces_the_content(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"
    write_file(path, "old", durable=durable)
    write_file(path, b"new\n", durable=durable)
    assert path.read_bytes() == b"new\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_file(path, "old")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="broken"):
        write_file(path, "new", durable=True)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_staged_files_are_renamed_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = [tmp_path / "card", tmp_path / "model"]
    renamed: list[str] = []
    replace = os.replace

    def noted(source: Path, target: Path) -> None:
        renamed.append(target.name)
        replace(source, target)

    monkeypatch.setattr(atomic_files.os, "replace", noted)
    with staged(*targets) as temporary:
        for path in temporary:
            path.write_text(path.name)
    assert renamed == ["card", "model"]
    assert sorted(tmp_path.iterdir()) == targets


def test_staged_files_are_deleted_if_the_block_fails(tmp_path: Path) -> None:
    def fail() -> None:
        with staged(tmp_path / "one", tmp_path / "two") as (one, _):
            one.write_text("half")
            raise Crash

    with pytest.raises(Crash):
        fail()
    assert not list(tmp_path.iterdir())


def test_a_staged_directory_replaces_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "keys"
    (tmp_path / "keys.new").mkdir()
    (tmp_path / "keys.new" / "left over").touch()
    for name in ("first", "second"):
        with staged_directory(target) as temporary:
            (temporary / name).touch()
    assert [path.name for path in target.iterdir()] == ["second"]
    assert target.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == [target]


def test_an_unsynced_rename_keeps_the_error_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.touch()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UnsyncedRename) as caught:
        rename_durably(source, target)
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == [target]
