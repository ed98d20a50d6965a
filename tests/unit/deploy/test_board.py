"""The Grafana board: its file is sound, and asks only for what nodes tell."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import yaml

from lightyear_node.barrier import Phase
from lightyear_node.observe.metrics import Metrics
from lightyear_node.records import PeerName
from tests.unit.deploy.board import BOARD, Panel, expressions, filled_in, load, panels
from tests.unit.deploy.promtool import DOCS, check_expressions

PANELS = load()["panels"]
ANY = {"job": "lightyear.*", "instance": ".*", "peer": ".*", "__rate_interval": "5m"}
NOT_OURS = {"ALERTS"}
COLUMNS = 24

each_panel = pytest.mark.parametrize("one", PANELS, ids=[panel["title"] for panel in PANELS])


def test_the_file_is_written_as_grafana_writes_it() -> None:
    """So that a board exported from Grafana differs where something was changed, and only there."""
    assert BOARD.read_text() == json.dumps(load(), indent=2, ensure_ascii=False) + "\n"


def test_every_metric_is_told_by_nodes() -> None:
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
        assert named <= known | labelled | NOT_OURS, query


def test_prometheus_reads_every_query(tmp_path: Path) -> None:
    queries = {name: filled_in(text, ANY) for name, text in expressions().items()}
    assert len(queries) > 30
    check_expressions(queries, tmp_path)


def test_a_query_that_prometheus_cannot_read_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="could not parse expression"):
        check_expressions({"Round A": "sum by (lightyear_round"}, tmp_path)


def test_rows_and_variables_are_in_their_order() -> None:
    rows = [panel["title"] for panel in PANELS if panel["type"] == "row"]
    assert rows == ["Now", "Peers", "Model", "Time and traffic", "Trust"]
    assert [one["name"] for one in variables()] == ["datasource", "job", "instance", "peer"]


def test_queries_use_the_boards_variables() -> None:
    for name, query in expressions().items():
        used = set(re.findall(r"\$(\w+)", query))
        assert {"job", "instance"} <= used <= set(ANY), name
        assert ('peer=~"$peer"' in query) == ("peer" in used), name


def test_every_panel_asks_the_chosen_data_source() -> None:
    for panel in panels():
        for asked in (panel, *panel["targets"]):
            assert asked["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_ids_are_unique() -> None:
    numbers = [panel["id"] for panel in PANELS]
    assert len(set(numbers)) == len(numbers)
    for panel in panels():
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)


@each_panel
def test_every_panel_says_what_it_is(one: Panel) -> None:
    assert one["title"].strip()
    assert one["description"].strip().endswith(".")


def test_panels_do_not_overlap_and_leave_no_hole() -> None:
    places = {}
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS
        across = range(place["x"], place["x"] + place["w"])
        down = range(place["y"], place["y"] + place["h"])
        for cell in itertools.product(across, down):
            assert cell not in places, f"{panel['title']} lies over {places.get(cell)}"
            places[cell] = panel["title"]
    assert len(places) == COLUMNS * (max(y for _, y in places) + 1)


def test_grafana_finds_the_board_where_the_page_puts_it() -> None:
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
