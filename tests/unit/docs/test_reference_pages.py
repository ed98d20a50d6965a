"""The reference pages are complete: every reason, rule, option and configuration key."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import BaseModel

from lightyear_node.config.federation import FederationConfig
from lightyear_node.config.node import NodeConfig
from lightyear_node.config.validation import table_in
from lightyear_node.learning.rules import RULES, rule_options
from lightyear_node.types import Fate, Reason, fate
from tests.support.paths import DOCS


def first_cells(text: str) -> set[str]:
    """The names in the first cells of all tables."""
    return names("\n".join(re.findall(r"^\|([^|]*)\|", text, re.MULTILINE)))


def names(text: str) -> set[str]:
    return set(re.findall(r"`([\w.-]+)`", text))


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The keys of a configuration file, nested ones with dots."""
    for name, field in model.model_fields.items():
        nested = table_in(field.annotation)
        yield from keys(nested, f"{prefix}{name}.") if nested else [f"{prefix}{name}"]


def sections(text: str, level: str) -> dict[str, str]:
    """The parts of a page by the first word of their heading."""
    found = rf"^{level} ([\w.]+)[^\n]*\n(.*?)(?=^{level} |\Z)"
    return dict(re.findall(found, text, re.MULTILINE | re.DOTALL))


def test_the_page_on_verdicts_lists_every_reason_with_its_fate() -> None:
    text = (DOCS / "verdicts.md").read_text()
    assert first_cells(text) == set(Reason)
    missing = {reason for reason in Reason if fate(False, reason) is Fate.MISSING}
    assert first_cells(sections(text, "##")["Missing"]) == missing


def test_the_page_on_rules_lists_every_rule_and_its_options() -> None:
    text = (DOCS / "rules.md").read_text()
    assert first_cells(text) == set(RULES)
    for rule in set(RULES) - {"lightyear"}:
        [row] = re.findall(rf"^\| `{rule}` \|(.*)\|$", text, re.MULTILINE)
        assert set(rule_options(rule)) <= names(row), rule


def test_the_page_on_configuration_lists_every_key() -> None:
    """A key is listed by its path, by its name in the section of its table, or by its table."""
    pages = sections((DOCS / "configuration.md").read_text(), "##")
    for model, file in ((FederationConfig, "peers.yaml"), (NodeConfig, "node.yaml")):
        listed = first_cells(pages[file])
        tables = {name: first_cells(part) for name, part in sections(pages[file], "###").items()}
        for key in keys(model):
            table, _, name = key.rpartition(".")
            assert key in listed or table in listed or name in tables.get(table, ()), key
