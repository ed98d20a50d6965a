"""The programs in examples/ run, are short, and use public names only."""

from __future__ import annotations

import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import lightyear_node
from tests.support.paths import ROOT

pytest.importorskip("sklearn")  # the digits

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LINES_MAX = 60


def run(name: str) -> Mapping[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


def printed_rows(text: str) -> dict[str, list[str]]:
    """The lines of the printed table, without the heading, by rule."""
    return {line.split()[0]: line.split()[1:] for line in text.splitlines()[1:]}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_imports_public_names_only(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= LINES_MAX
    assert not re.findall(r"^\s*(?:from|import) lightyear_node\.", text, re.MULTILINE)
    [names] = re.findall(r"^from lightyear_node import (.*)$", text, re.MULTILINE)
    assert set(re.findall(r"\w+", names)) <= set(lightyear_node.__all__)


@pytest.mark.slow
def test_the_rule_accepts_fewer_flipped_models_than_averaging(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("own_rule.py")
    rows = printed_rows(capsys.readouterr().out)
    assert list(rows) == ["low_loss", "fedavg", "local"]
    # One bad site of five, judged by four in each of four rounds.
    assert rows["fedavg"][1:] == ["16", "of", "16"]
    assert rows["local"][1:] == ["0", "of", "0"]
    assert int(rows["low_loss"][1]) < 8
    assert float(rows["low_loss"][0]) > float(rows["fedavg"][0])


@pytest.mark.slow
def test_the_attack_harms_averaging(capsys: pytest.CaptureFixture[str]) -> None:
    run("own_attack.py")
    rows = printed_rows(capsys.readouterr().out)
    assert list(rows) == ["fedavg", "krum", "lightyear"]
    # Two bad sites of five, each judged by four in each of four rounds.
    assert rows["fedavg"][2:] == ["32", "of", "32"]
    assert float(rows["fedavg"][1]) < float(rows["fedavg"][0]) - 0.1


def test_the_notebook_plots_the_curves_of_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    shown: list[bool] = []
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: shown.append(True))
    names = run("notebook.py")
    lines = {line.get_label(): line.get_ydata() for line in names["axes"].get_lines()}
    assert shown == [True]
    assert list(lines) == ["local", "fedavg", "lightyear"]
    honest = [
        record
        for record in names["records"]
        if record["kind"] == "round" and not record["site_malfunctions"]
    ]
    for rule, values in lines.items():
        assert len(values) == 6
        for number, value in enumerate(values):
            scores = [
                record["merged.accuracy"]
                for record in honest
                if (record["rule"], record["round"]) == (rule, number)
            ]
            assert len(scores) == 4
            assert value == pytest.approx(sum(scores) / 4)
    # With one flipped model in the mean, averaging is worse than training alone.
    assert lines["fedavg"][-1] < lines["local"][-1]
