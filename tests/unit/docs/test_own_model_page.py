"""The tasks on docs/bring-your-own-model.md pass what `check` tries."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from lightyear_node import load_task
from lightyear_node.config.federation import ExchangeConfig, RuleConfig
from lightyear_node.config.node import TaskConfig
from lightyear_node.types import Mark
from lightyear_node.worker.site import LocalSite
from lightyear_node.worker.training import HUGGING_FACE_INPUTS
from tests.support.paths import DOCS

PAGE = (DOCS / "bring-your-own-model.md").read_text()
TASKS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))


@pytest.mark.parametrize("name", TASKS)
def test_the_task_on_the_page_passes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{name}.py").write_text(TASKS[name])
    monkeypatch.syspath_prepend(str(tmp_path))
    task = load_task(f"{name}:build")
    site = LocalSite(task, name="site-a", seed=1, rule=RuleConfig(), device="cpu")
    checks, _ = site.rehearse(full=True)
    assert {check.name: check.about for check in checks if check.mark is not Mark.HOLDS} == {}
    assert len(checks) == 2 + len(task.metrics)
    del sys.modules[name]


def test_the_page_has_every_task_and_every_key_of_a_batch() -> None:
    assert len(TASKS) == PAGE.count("```python") == 3
    assert all(f"`{key}`" in PAGE for key in HUGGING_FACE_INPUTS)


def test_the_settings_on_the_page_are_valid() -> None:
    import yaml

    [exchange, task] = [
        yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    ]
    assert ExchangeConfig(**exchange["exchange"]).include == ("*lora_*", "*classifier*")
    assert TaskConfig(**task["task"]).name == "spleen_ct_segmentation"
