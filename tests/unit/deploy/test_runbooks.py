"""The runbooks: one per alert, with equal sections and existing commands."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
import typer
import yaml

import lightyear_node.cli
from lightyear_node.config.node import NodeConfig
from tests.support.page_commands import commands_in, only_reads
from tests.support.paths import DOCS
from tests.support.promtool import ALERTS

RUNBOOKS = DOCS / "runbooks"
INDEX = RUNBOOKS / "README.md"
PAGES = sorted(set(RUNBOOKS.glob("*.md")) - {INDEX})
SECTIONS = [
    "See more",
    "Likely causes, in order",
    "What to do",
    "When it is a false alarm",
    "Silence",
]

RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def check_command(arguments: list[str]) -> None:
    """Parse a command as the program does, without running it."""
    for module in iter_modules(lightyear_node.cli.__path__):
        import_module(f"lightyear_node.cli.{module.name}")  # registers its commands
    command: Any = typer.main.get_command(lightyear_node.cli.app)
    path = "lightyear-node"
    while arguments and arguments[0] in getattr(command, "commands", {}):
        command = command.commands[arguments[0]]
        path += f" {arguments[0]}"
        arguments = arguments[1:]
    assert not hasattr(command, "commands"), f"`{path} {' '.join(arguments)}` is no command"
    if arguments:  # a bare name only mentions the command
        command.make_context(path, list(arguments))


def test_a_command_that_does_not_exist_is_detected() -> None:
    page = "Type `lightyear-node\nstatus` or\n```bash\nlightyear-node peers ping  # all\n```\n"
    assert commands_in(page) == [["peers", "ping"], ["status"]]
    for wrong in (["statos"], ["peers", "pong"], ["peers"], ["status", "--peer", "site-b"]):
        with pytest.raises(Exception, match=r"no command|No such option"):
            check_command(wrong)


@pytest.mark.parametrize("page", [INDEX, *PAGES, DOCS / "grafana.md"], ids=lambda page: page.stem)
def test_every_command_on_a_page_exists(page: Path) -> None:
    for arguments in commands_in(page.read_text()):
        check_command(arguments)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_command_in_an_alert_exists(rule: dict[str, Any]) -> None:
    text = re.sub(r"\{\{.*?\}\}", "site-b", rule["annotations"]["description"])
    for arguments in commands_in(text):
        check_command(arguments)


def test_every_alert_has_a_page_in_the_index() -> None:
    alerts = [rule["alert"] for rule in RULES]
    assert {page.stem for page in PAGES} == set(alerts)
    listed = re.findall(r"^\| \[(\w+)\]\((\w+)\.md\) \| (\w+) \|", INDEX.read_text(), re.MULTILINE)
    severities = [(rule["alert"], rule["alert"], rule["labels"]["severity"]) for rule in RULES]
    assert listed == severities


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_has_the_same_sections(page: Path) -> None:
    text = page.read_text()
    assert text.startswith(f"# {page.stem}\n\n**What it means.** ")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    assert only_reads(text), "no command that only reads"
    assert f"amtool silence add alertname={page.stem} " in text


@pytest.mark.parametrize("page", [INDEX, *PAGES, DOCS / "grafana.md"], ids=lambda page: page.stem)
def test_every_link_target_exists(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_settings_in_the_documentation_are_valid() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (DOCS / "grafana.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        NodeConfig.model_validate(yaml.safe_load(block))
