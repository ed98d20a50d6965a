"""docs/own-attack.md: its attacks, commands, suite and package are used as written."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightyear_node import simulate
from lightyear_node.lab.malfunction_plugins import AttackContext
from lightyear_node.lab.tasks.digits import build
from tests.support import page_package
from tests.support.page_package import blocks, documented_commands, installed, run, write_modules
from tests.support.paths import DOCS

pytest.importorskip("sklearn")

PAGE = DOCS / "own-attack.md"
SMALL = {"epochs": 1, "batch_size": 64}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the page's module, on the path of this process."""
    write_modules(PAGE, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_attacks", raising=False)
    return tmp_path


def test_the_documented_command_runs_as_written(module: Path) -> None:
    [command] = documented_commands(PAGE)
    environment = page_package.environment(module)
    small = [f"--arg={key}={value}" for key, value in SMALL.items()]
    words = (*command, "--rounds", "2", *small, "--format", "json")
    data = json.loads(run(*words, cwd=module, environment=environment))["data"]
    expected = {"kind": "my_attacks:inner_product", "scale": None, "options": {"epsilon": 1.0}}
    assert list(data["malfunctions"].values()) == [expected] * 2


def test_the_documented_python_runs_as_written(module: Path) -> None:
    [example] = [block for block in blocks(PAGE, "python") if not block.startswith("# ")]
    names: dict[str, Any] = {}
    exec(compile(example, str(PAGE), "exec"), names)
    rounds = [record for record in names["records"] if record["kind"] == "round"]
    assert len(rounds) == 5 * 2
    assert sum(record["site_malfunctions"] for record in rounds) == 2 * 2


@pytest.mark.parametrize("name", ["inner_product", "a_little", "backdoor"])
def test_every_documented_attack_changes_what_the_honest_sites_merge(
    module: Path, name: str
) -> None:
    def losses(**settings: Any) -> list[float]:
        records = simulate(
            build, arguments=SMALL, sites=4, rounds=1, rule="fedavg", bad=2, **settings
        )
        rounds = [record for record in records if record["kind"] == "round"]
        attackers = {record["site"] for record in rounds if record["site_malfunctions"]}
        assert len(attackers) == (0 if settings["malfunction"] == "none" else 2)
        return [record["merged.loss"] for record in rounds]

    import my_attacks

    clean, attacked = losses(malfunction="none"), losses(malfunction=getattr(my_attacks, name))
    assert all(one != other for one, other in zip(clean, attacked, strict=True))
    if name == "inner_product":
        assert sum(attacked) > sum(clean)


def test_the_documented_success_is_measured_at_honest_sites(module: Path) -> None:
    import my_attacks

    records = simulate(
        build, arguments=SMALL, sites=3, rounds=1, rule="fedavg", malfunction=my_attacks.backdoor
    )
    for record in (one for one in records if one["kind"] == "round"):
        measured = {name for name in record if name.endswith(".attack_success")}
        both = {"local.attack_success", "merged.attack_success"}
        assert measured == (set() if record["site_malfunctions"] else both)


@pytest.mark.slow
def test_a_suite_and_an_installed_package_name_the_documented_attack(tmp_path: Path) -> None:
    environment = installed(PAGE, tmp_path / "installed")
    listed = yaml.safe_load(blocks(PAGE, "yaml")[0])["malfunctions"]
    project = tomllib.loads(blocks(PAGE, "toml")[0])["project"]
    [short_name] = project["entry-points"]["lightyear_node.malfunctions"]
    grid = {
        "name": "main", "task": "digits", "args": SMALL, "clients": 3, "rounds": 1,
        "rules": ["fedavg"], "bad": [1],
        "malfunctions": [*listed, short_name, "my_attacks:missing"],
    }  # fmt: skip
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump({"name": "mine", "grids": [grid]}))
    words = ("experiment", "suite.yaml", "--out", "out", "--no-view", "--format", "json")
    # A job fails, because the page has no such attack; the others go on.
    answer = run(*words, cwd=tmp_path, environment=environment, code=1)
    ran = json.loads(answer[: answer.rindex("}") + 1])["data"]
    [failed] = ran["failed"]
    assert "malfunction my_attacks:missing cannot be imported: AttributeError" in failed["message"]
    scores = {score["malfunction"]: score for score in ran["scores"]}
    assert set(scores) == {
        "none", "my_attacks:inner_product", "my_attacks:inner_product epsilon=1.0", short_name,
    }  # fmt: skip
    means = {name: score["mean_honest"] for name, score in scores.items()}
    assert means[short_name] == means["my_attacks:inner_product"]


def test_the_page_lists_every_field_of_the_context() -> None:
    table = PAGE.read_text().split("| field of `context` |")[1].split("\n\n")[0]
    cells = " ".join(re.findall(r"^\|([^|]*)\|", table, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", cells)) == {field.name for field in fields(AttackContext)}
