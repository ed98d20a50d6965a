"""The Grafana dashboard: its file is valid and queries existing metrics only."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import yaml

from lightyear_node.observe.metrics import Metrics
from lightyear_node.protocol.parameters import Phase
from lightyear_node.types import PeerName
from tests.support.grafana_board import BOARD, Panel, expressions, filled_in, load, panels
from tests.support.paths import DOCS
from tests.support.promtool import check_expressions

PANELS = load()["panels"]
ANY = {"job": "lightyear.*", "instance": ".*", "peer": ".*", "__rate_interval": "5m"}
PROMETHEUS_METRICS = {"ALERTS"}
COLUMNS = 24

each_panel = pytest.mark.parametrize("one", PANELS, ids=[panel["title"] for panel in PANELS])


def test_the_file_is_formatted_as_grafana_exports_it() -> None:
    """So that an export from Grafana differs only where something was changed."""
    assert BOARD.read_text() == json.dumps(load(), indent=2, ensure_ascii=False) + "\n"


def test_every_metric_exists() -> None:
    metrics = Metrics([PeerName("site-b")], [*Phase, "starting"], "0", 1)
    families = list(metrics.registry.collect())
    known = {sample.name for family in families for sample in family.samples}
    labelled = {family.name for family in families}  # some have series only after a first round
    queries = [
        *expressions().values(),
        *(v["definition"] for v in variables() if "definition" in v),
    ]
    for query in queries:
        named = set(re.findall(r"\b(lightyear_\w+|up|ALERTS)\b(?!\.)", query))
        assert named, query
        assert named <= known | labelled | PROMETHEUS_METRICS, query


def test_every_query_is_valid(tmp_path: Path) -> None:
    queries = {name: filled_in(text, ANY) for name, text in expressions().items()}
    assert len(queries) > 30
    check_expressions(queries, tmp_path)


def test_an_invalid_query_is_detected(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="could not parse expression"):
        check_expressions({"Round A": "sum by (lightyear_round"}, tmp_path)


def test_rows_and_variables_are_in_order() -> None:
    rows = [panel["title"] for panel in PANELS if panel["type"] == "row"]
    assert rows == ["Now", "Peers", "Model", "Time and traffic", "Trust"]
    assert [one["name"] for one in variables()] == ["datasource", "job", "instance", "peer"]


def test_queries_use_the_dashboards_variables() -> None:
    for name, query in expressions().items():
        used = set(re.findall(r"\$(\w+)", query))
        assert {"job", "instance"} <= used <= set(ANY), name
        assert ('peer=~"$peer"' in query) == ("peer" in used), name


def test_every_panel_uses_the_selected_data_source() -> None:
    for panel in panels():
        for item in (panel, *panel["targets"]):
            assert item["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_ids_are_unique() -> None:
    numbers = [panel["id"] for panel in PANELS]
    assert len(set(numbers)) == len(numbers)
    for panel in panels():
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)


@each_panel
def test_every_panel_has_a_title_and_a_description(one: Panel) -> None:
    assert one["title"].strip()
    assert one["description"].strip().endswith(".")


def test_panels_neither_overlap_nor_leave_gaps() -> None:
    cells = {}
    for panel in PANELS:
        position = panel["gridPos"]
        assert position["x"] + position["w"] <= COLUMNS
        across = range(position["x"], position["x"] + position["w"])
        down = range(position["y"], position["y"] + position["h"])
        for cell in itertools.product(across, down):
            assert cell not in cells, f"{panel['title']} overlaps {cells.get(cell)}"
            cells[cell] = panel["title"]
    assert len(cells) == COLUMNS * (max(y for _, y in cells) + 1)


def test_the_documented_paths_match_the_provisioning() -> None:
    [board] = read("dashboards")["providers"]
    [source] = read("datasources")["datasources"]
    page = (DOCS / "grafana.md").read_text()
    assert f"deploy/grafana/dashboard.json {board['options']['path']}/" in page
    assert source["type"] == "prometheus"
    for folder in ("dashboards", "datasources"):
        assert f"deploy/grafana/provisioning/{folder}/lightyear.yml" in page


def read(folder: str) -> dict[str, list[dict[str, object]]]:
    file = BOARD.parent / "provisioning" / folder / "lightyear.yml"
    return dict(yaml.safe_load(file.read_text()))


def variables() -> list[dict[str, object]]:
    return list(load()["templating"]["list"])
