"""The lock file of a state directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightyear_node.errors import AlreadyRunning, StoreError
from lightyear_node.storage.state_directory import StateDirectory


def test_the_lock_names_the_process_and_excludes_others(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)
    try:
        assert (tmp_path / "LOCK").read_text() == str(os.getpid())
        with pytest.raises(AlreadyRunning, match=f"process {os.getpid()}"):
            StateDirectory(tmp_path)
    finally:
        state.close()
    (tmp_path / "LOCK").write_text("123456789")  # of a longer number before
    StateDirectory(tmp_path).close()
    assert (tmp_path / "LOCK").read_text() == str(os.getpid())


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_refused_and_its_target_unchanged(tmp_path: Path, there: bool) -> None:
    precious = tmp_path / "precious"
    if there:
        precious.write_text("keep me")
    (tmp_path / "state").mkdir()
    (tmp_path / "state/LOCK").symlink_to(precious)
    with pytest.raises(StoreError, match="LOCK is a symbolic link") as caught:
        StateDirectory(tmp_path / "state")
    assert "rm " in str(caught.value.hint)
    assert precious.exists() is there
    assert not there or precious.read_text() == "keep me"


def test_a_pipe_is_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "LOCK")
    with pytest.raises(StoreError, match="LOCK is not a file"):
        StateDirectory(tmp_path)
