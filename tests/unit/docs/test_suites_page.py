"""docs/suites.md lists every key with its default, and its examples are valid."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from lightyear_node.config.federation import ExchangeConfig, RuleConfig
from lightyear_node.lab.jobs import expand, expand_acceptance
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.lab.partition import PartitionConfig, config_of
from lightyear_node.lab.suite import (
    AcceptanceBlock,
    ExperimentGrid,
    RuleChoice,
    Suite,
    load_suite,
)
from lightyear_node.lab.tasks import BUILT_IN
from tests.support.page_package import blocks
from tests.support.paths import DOCS

PAGE = DOCS / "suites.md"
TEXT = PAGE.read_text()
MODELS: dict[str, type[BaseModel]] = {
    "Suite": Suite,
    "grids": ExperimentGrid,
    "malfunctions": MalfunctionConfig,
    "partition": PartitionConfig,
    "exchange": ExchangeConfig,
    "acceptance": AcceptanceBlock,
}
GRID = {"name": "main", "task": "digits", "rules": ["fedavg"]}
EXAMPLES = blocks(PAGE, "yaml")


def section(heading: str) -> str:
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    return found[1]


def table(heading: str) -> dict[str, str]:
    """The keys of a section's table with the text of their defaults."""
    rows = re.findall(r"^\| (`[^|]*`) \| ([^|]*)\| [^|]* \|$", section(heading), re.MULTILINE)
    return {key: default.strip() for keys, default in rows for key in re.findall(r"`(\w+)`", keys)}


def differing_defaults(listed: dict[str, str], model: type[BaseModel]) -> list[str]:
    """The keys whose default in the table is code and is not that of the model."""
    known = {
        name: field.get_default(call_default_factory=True)
        for name, field in model.model_fields.items()
        if not field.is_required()
    }
    plain = {
        name: list(value) if isinstance(value, tuple) else value for name, value in known.items()
    }
    plain |= {"malfunctions": ["none"]} if "malfunctions" in plain else {}
    if model is PartitionConfig:  # these defaults depend on the kind
        plain |= {"alpha": config_of("dirichlet").computed()["alpha"]}
        plain |= {"classes": config_of("labels").computed()["classes"]}
    written = {key: yaml.safe_load(text.strip("`")) for key, text in listed.items() if "`" in text}
    absent = object()
    return [key for key, value in written.items() if plain.get(key, absent) != value]


@pytest.mark.parametrize("heading", MODELS)
def test_the_tables_list_exactly_the_keys_of_the_models_with_their_defaults(heading: str) -> None:
    listed = table(heading)
    assert listed.keys() == MODELS[heading].model_fields.keys()
    assert differing_defaults(listed, MODELS[heading]) == []
    required = {name for name, field in MODELS[heading].model_fields.items() if field.is_required()}
    assert not {key for key in required if "`" in listed[key]}


def test_the_table_of_rules_lists_the_rules_settings_and_the_label() -> None:
    assert RuleChoice.model_fields.keys() == {"terms", "label"}
    listed = table("rules")
    assert listed.keys() == {*RuleConfig.model_fields, "label"}
    assert differing_defaults(listed, RuleConfig) == []


def test_a_key_that_the_page_does_not_list_and_a_wrong_default_are_found() -> None:
    class Longer(PartitionConfig):
        more: int = 1

    assert table("partition").keys() != Longer.model_fields.keys()
    assert differing_defaults({"samples_min": "`11`", "alpha": "`0.5`"}, PartitionConfig) == [
        "samples_min"
    ]


def test_the_defaults_of_the_built_in_tasks_are_listed() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (\w+) \|$", TEXT, re.MULTILINE)
    assert [
        (name, int(clients), int(rounds), metric) for name, clients, rounds, metric in rows
    ] == [(task.name, task.clients, task.rounds, task.metric) for task in BUILT_IN.values()]


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_is_a_valid_suite_or_part_of_a_grid(example: str, tmp_path: Path) -> None:
    document: dict[str, Any] = yaml.safe_load(example)
    if "name" not in document:
        document = {"name": "example", "grids": [{**GRID, **document}]}
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(document))
    suite = load_suite(tmp_path / "suite.yaml")
    assert expand(suite) or expand_acceptance(suite)


def test_the_first_example_uses_every_key() -> None:
    suite = yaml.safe_load(EXAMPLES[0])
    [grid], [block] = suite["grids"], suite["acceptance"]
    assert suite.keys() == Suite.model_fields.keys()
    assert grid.keys() == ExperimentGrid.model_fields.keys()
    assert block.keys() == AcceptanceBlock.model_fields.keys()
    rules = [rule for rule in grid["rules"] if isinstance(rule, dict)]
    assert {key for rule in rules for key in rule} == {*RuleConfig.model_fields, "label"}
    used = {*grid["partition"], *block["partition"]}
    assert used == PartitionConfig.model_fields.keys()
    assert grid["exchange"].keys() == ExchangeConfig.model_fields.keys()
