"""The list of built-in tasks, and the messages when their data is missing."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from lightyear_node.errors import ConfigError
from lightyear_node.lab.tasks import BUILT_IN, DATA_VARIABLE, data_root

WITH_DATA = [name for name, task in BUILT_IN.items() if task.files]


def test_the_list_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, lightyear_node.lab.tasks; "
        "print({'torch', 'numpy', 'monai', 'PIL'} & sys.modules.keys())"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert shown.strip() == "set()"


def test_the_list_is_complete() -> None:
    folder = Path(importlib.import_module("lightyear_node.lab.tasks").__path__[0])
    builders = {file.stem for file in folder.glob("*.py") if "def build(" in file.read_text()}
    assert {task.entry for task in BUILT_IN.values()} == {
        f"lightyear_node.lab.tasks.{module}:build" for module in builders
    }
    assert all(name == task.name for name, task in BUILT_IN.items())


@pytest.mark.parametrize("name", WITH_DATA)
def test_the_list_agrees_with_the_modules(name: str) -> None:
    task = BUILT_IN[name]
    module = importlib.import_module(task.entry.partition(":")[0])
    assert task.files == task.reads({}) == (module.FILE,)
    full = getattr(module, "FULL_FILE", module.FILE)
    assert task.reads({"full": True}) == (full,)
    assert task.clients == module.CLIENTS


@pytest.mark.parametrize("name", WITH_DATA)
def test_without_data_the_error_names_the_variable_and_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"lightyear_node.lab.tasks.{name}")
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    for arguments, message in (
        ({}, "data directory of this task is not set"),
        ({"data": str(tmp_path / "none")}, "no data directory"),
        ({"data": str(tmp_path)}, BUILT_IN[name].files[0]),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            module.build(0, **arguments)
        assert caught.value.hint is not None
        assert DATA_VARIABLE in caught.value.hint
        assert BUILT_IN[name].files[0] in caught.value.hint


def test_the_argument_takes_precedence_over_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, named = tmp_path / "given", tmp_path / "named"
    given.mkdir()
    named.mkdir()
    monkeypatch.setenv(DATA_VARIABLE, str(named))
    assert data_root(None) == named
    assert data_root(str(given)) == given


def test_a_damaged_file_is_reported_by_name(tmp_path: Path) -> None:
    from lightyear_node.lab.tasks import heart

    file = tmp_path / "heart_disease" / "heart_disease.npz"
    file.parent.mkdir()
    for content in (b"", b"PK\x03\x04 torn", b"no zip at all"):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"heart_disease\.npz. cannot be read"):
            heart.build(0, data=str(tmp_path))
