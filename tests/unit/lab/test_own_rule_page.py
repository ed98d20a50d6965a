"""docs/own-rule.md: its package is installed, its commands and settings are used as written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.page_package import blocks, documented_commands, installed, run
from tests.support.paths import DOCS

pytest.importorskip("sklearn")

PAGE = DOCS / "own-rule.md"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return installed(PAGE, tmp_path / "installed")


def test_the_documented_commands_run_as_written(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    [command] = documented_commands(PAGE)
    answer = run(*command, "--format", "json", cwd=tmp_path, environment=environment)
    data: dict[str, Any] = json.loads(answer)["data"]
    assert data["rule_terms"]["name"] == "my_rule"
    assert data["rule_terms"]["options"] == {"slack": 0.2}
    judged = {site["malfunctioning"]: site["judged"] for site in data["sites"]}
    assert judged[True]["refused_by_rule"] > judged[True].get("ok", 0)
    assert judged[False]["ok"] > 0


@pytest.mark.slow
def test_a_suite_and_a_node_accept_the_documented_rule(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    rule = yaml.safe_load(blocks(PAGE, "yaml")[0])["rule"]
    grid = {
        "name": "main",
        "task": "digits",
        "args": {"epochs": 1, "batch_size": 64},
        "clients": 2,
        "rounds": 1,
        "rules": [rule],
    }
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump({"name": "mine", "grids": [grid]}))
    words = ("experiment", "suite.yaml", "--out", "out", "--no-view", "--format", "json")
    ran = json.loads(run(*words, cwd=tmp_path, environment=environment))["data"]
    assert [score["label"] for score in ran["scores"]] == ["my_rule"]

    joins = []
    for name in ("site-a", "site-b"):
        made = ("init", name, "--name", name, "--address", f"{name}.invalid:7443")
        run(*made, cwd=tmp_path, environment=environment)
        joins.append(run("id", "--home", name, cwd=tmp_path, environment=environment).strip())
    run("peers", "add", "--federation", "ward", *joins, cwd=tmp_path, environment=environment)
    config = yaml.safe_load((tmp_path / "peers.yaml").read_text())
    (tmp_path / "peers.yaml").write_text(yaml.safe_dump({**config, "rule": rule}))
    words = ("check", "--home", "site-a", "--peers", "peers.yaml", "--timeout", "1")
    # `check` exits with 3, because the other site does not run.
    checked = run(*words, cwd=tmp_path, environment=environment, code=3)
    assert "rule my_rule" in checked
    assert "parameters" in checked  # the worker has loaded the rule and built the model
