"""The alert rules: valid, tested firing and quiet, with texts and runbooks."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightyear_node.observe.metrics import Metrics
from lightyear_node.protocol.parameters import Phase
from lightyear_node.types import PeerName, Reason
from tests.support.needs import need_tool
from tests.support.paths import DOCS
from tests.support.promtool import ALERTS, DEPLOY, RECORDING, promtool

SEVERITIES = {"critical", "warning"}
TESTS = sorted((DEPLOY / "prometheus" / "tests").glob("*.test.yml"))


def rules_of(file: Path) -> list[dict[str, Any]]:
    groups = yaml.safe_load(file.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


RULES = rules_of(ALERTS)
NAMES = [rule["alert"] for rule in RULES]


def scenarios() -> list[tuple[str, str, set[str]]]:
    """For every test: its alert, the expectation, and all alerts that fire in it."""
    found = []
    for file in TESTS:
        for test in yaml.safe_load(file.read_text())["tests"]:
            alert, _, expectation = test["name"].partition(": ")
            samples = [one for check in test["promql_expr_test"] for one in check["exp_samples"]]
            fired = {re.findall(r'alertname="(\w+)"', one["labels"])[0] for one in samples}
            found.append((alert, expectation, fired))
    return found


def test_the_rules_are_valid() -> None:
    ended = promtool("check", "rules", ALERTS, RECORDING)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_example_configuration_is_valid_with_the_rules(tmp_path: Path) -> None:
    install(tmp_path)
    ended = promtool("check", "config", tmp_path / "prometheus.yml")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 rule files found" in ended.stdout


def test_the_commented_variants_are_valid(tmp_path: Path) -> None:
    install(tmp_path)
    example = tmp_path / "prometheus.yml"
    variants = re.sub(r"(?m)^(  )# ( *- job_name|  +\S)", r"\1\2", example.read_text())
    secrets = re.findall(r"/etc/prometheus/lightyear/\w+[.\w]*", variants)
    assert len(secrets) == 3
    for secret in secrets:
        (tmp_path / Path(secret).name).write_text("x")
    example.write_text(variants.replace("/etc/prometheus/lightyear/", f"{tmp_path}/"))
    assert len(yaml.safe_load(variants)["scrape_configs"]) == 4
    ended = promtool("check", "config", "--syntax-only", example)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("file", TESTS, ids=lambda file: file.stem)
def test_every_rule_passes_its_tests(file: Path) -> None:
    ended = promtool("test", "rules", file)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("name", NAMES)
def test_every_alert_is_tested_firing_and_quiet(name: str) -> None:
    ours = [
        (expectation.partition(" ")[0], fired)
        for alert, expectation, fired in scenarios()
        if alert == name
    ]
    assert [fired for verb, fired in ours if verb == "fires"], "no test in which it fires"
    assert [fired for verb, fired in ours if verb == "quiet"], "no test in which it is quiet"
    for verb, fired in ours:
        assert (name in fired) == (verb == "fires")


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_every_alert_has_a_severity_and_a_runbook(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in SEVERITIES
    assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{rule['alert']}.md"
    assert (DOCS / "runbooks" / f"{rule['alert']}.md").is_file()


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_every_alert_names_the_site_and_the_first_step(
    rule: dict[str, Any], tmp_path: Path
) -> None:
    shown = rendered(rule["alert"], tmp_path)
    summary, description = shown["summary"], shown["description"]
    assert "First: " in description
    for text in (summary, description):
        assert not re.search(r"<error|<no value>|\{\{|NaN|  ", text), text
        assert "site-a" in text
        if "$labels.peer" in rule["annotations"]["summary"]:
            assert "site-b" in text
    assert len(summary) < 100


def rendered(alert: str, folder: Path) -> dict[str, str]:
    """Return the rendered annotations; promtool prints them if an empty alert is expected."""
    scenario = next(
        test
        for file in TESTS
        for test in yaml.safe_load(file.read_text())["tests"]
        if test["name"].startswith(f"{alert}: fires")
    )
    fires = [one for one in scenario["promql_expr_test"] if alert in str(one["exp_samples"])]
    expected = {"alertname": alert, "eval_time": fires[0]["eval_time"], "exp_alerts": [{}]}
    plan = {
        "rule_files": [str(RECORDING), str(ALERTS)],
        "evaluation_interval": scenario["interval"],
        "tests": [
            {
                "interval": scenario["interval"],
                "input_series": scenario["input_series"],
                "alert_rule_test": [expected],
            }
        ],
    }
    file = folder / "rendered.yml"
    file.write_text(yaml.safe_dump(plan))
    ended = promtool("test", "rules", file)
    output = ended.stdout + ended.stderr
    got = output.partition("got:")[2]
    found = re.search(r"Annotations:\{(.*?)\}[\s\]]*(?:\n|$)", got, re.DOTALL)
    assert found, output
    return dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', found[1]))


def test_rules_use_existing_metrics_only() -> None:
    metrics = Metrics([PeerName("site-b")], [*Phase, "starting"], "0", 1)
    known = {sample.name for family in metrics.registry.collect() for sample in family.samples}
    recorded = {rule["record"] for rule in rules_of(RECORDING)}
    for rule in [*RULES, *rules_of(RECORDING)]:
        named = set(re.findall(r"[\w:]*lightyear_\w[\w:]*", rule["expr"]))
        assert named <= known | recorded, rule
        phases = re.findall(r'phase=~?"([^"]*)"', rule["expr"])
        assert {one for text in phases for one in text.split("|")} <= set(Phase)
        reasons = re.findall(r'reason=~?"([^"]*)"', rule["expr"])
        assert {one for text in reasons for one in text.split("|")} <= set(Reason)


def install(folder: Path) -> None:
    """Run the commands of docs/grafana.md, with `folder` in place of /etc/prometheus."""
    text = (DOCS / "grafana.md").read_text()
    [commands] = re.findall(r"<!-- install: rules -->\n```bash\n(.*?)```", text, re.DOTALL)
    script = commands.replace("sudo ", "").replace("/etc/prometheus", str(folder))
    script = re.sub(r"(?m)^systemctl.*$", "", script)
    need_tool("bash", "promtool")
    subprocess.run(["bash", "-euc", script], cwd=DEPLOY.parent, check=True)


def test_installed_rules_link_to_the_hospitals_runbooks(tmp_path: Path) -> None:
    install(tmp_path)
    for rule in rules_of(tmp_path / "rules" / "lightyear-alerts.yml"):
        address = rule["annotations"]["runbook_url"]
        assert address == f"https://wiki.hospital.example/lightyear/{rule['alert']}.md"
