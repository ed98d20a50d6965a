"""docs/training-scripts.md: its script runs as it stands, alone and under a node."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from lightyear_node.config.node import TaskConfig
from tests.support.paths import DOCS
from tests.support.script_worker import run_alone, run_here

PAGE = (DOCS / "training-scripts.md").read_text()
[SCRIPT] = re.findall(r"```python\n(# train.py\n.*?)```", PAGE, re.DOTALL)
[SETTINGS] = re.findall(r"```yaml\n(# node.yaml\n.*?)```", PAGE, re.DOTALL)


def test_the_script_trains_rounds_under_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = run_here(tmp_path, SCRIPT, monkeypatch)
    assert all("ok" in answer for answer in answers)
    trained = [answer["ok"] for answer in answers if "samples" in answer["ok"]]
    assert [answer["samples"] for answer in trained] == [100, 100]
    assert trained[1]["metrics"]["loss"] < trained[0]["metrics"]["loss"]


def test_the_script_runs_alone(tmp_path: Path) -> None:
    assert run_alone(tmp_path, SCRIPT) == ""


def test_the_settings_name_the_script() -> None:
    task = TaskConfig(**yaml.safe_load(SETTINGS)["task"])
    assert (task.name, task.args) == ("train.py", ())


@pytest.mark.parametrize(("library", "call"), [("Lightning", "fit"), ("Hugging Face", "train")])
def test_the_short_loops_are_those_that_the_tests_run(library: str, call: str) -> None:
    """tests/unit/training runs the same four lines with both libraries."""
    [loop] = re.findall(rf"## {library}\n.*?```python\n(.*?)```", PAGE, re.DOTALL)
    tested = Path(__file__).parents[1] / f"training/test_{library.lower().replace(' ', '_')}.py"
    for line in loop.splitlines():
        known = line.replace("val_loader", "val").replace("train_loader", "train")
        assert known in tested.read_text(), line
    assert f"trainer.{call}(" in loop
