"""The JSON API: responses, errors, and what is never sent."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.errors import JournalCorrupt
from lightyear_node.observe.http.api import ROUNDS_MAX, ApiSource, api_route
from lightyear_node.observe.http.server import Request, Response, Route
from lightyear_node.observe.http.static_files import FOLDER, POLICY, page_route
from lightyear_node.observe.http.views import (
    event_view,
    peer_view,
    round_summary,
    round_view,
    status_view,
    without_paths,
)
from lightyear_node.types import PeerName
from tests.support.journals import three_sites

A, B, C = (PeerName(f"site-{letter}") for letter in "abc")


def stuck(*args: object) -> Any:
    raise TimeoutError


def broken(*args: object) -> Any:
    raise JournalCorrupt("/var/lib/secret/journal.db: damaged")


def source(journal: Path | None = None, **changed: Any) -> ApiSource:
    answers: dict[str, Any] = {
        "status": lambda: {"name": A, "loss": math.nan, "peers": []},
        "sites": lambda: [{"name": A, "api": "api/v1"}],
        "rounds": lambda: [{"round": number} for number in range(3, 500)],
        "in_short": lambda entry: entry,
        "round": lambda number: round_view(journal, number) if journal else {},
        "peer": lambda number, peer: peer_view(journal, number, peer) if journal else {},
        "events": lambda: [{"seq": seq, "message": "so"} for seq in range(5, 9)],
        "run": "first",
    }
    return ApiSource(**(answers | changed))


def get(route: Route, target: str) -> tuple[int, Any]:
    path, _, query = target.partition("?")
    answer = route(Request(path, query))
    assert isinstance(answer, Response)
    return answer.status, json.loads(answer.body)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Path]:
    sites = three_sites(tmp_path)
    yield sites[A].path
    for site in sites.values():
        site.close()


def numbers(route: Route, query: str) -> list[int]:
    status, data = get(route, f"/api/v1/rounds{query}")
    assert (status, data["first"], data["last"]) == (200, 3, 499)
    return [entry["round"] for entry in data["rounds"]]


def test_rounds_are_paged_with_a_limit() -> None:
    route = api_route(source())
    assert numbers(route, "") == list(range(450, 500))
    assert numbers(route, "?limit=2") == [498, 499]
    assert numbers(route, "?since=0&limit=3") == [3, 4, 5]
    assert numbers(route, "?limit=1&since=499") == [499]
    assert numbers(route, "?since=500") == []
    assert len(numbers(route, f"?since=0&limit={ROUNDS_MAX}")) == ROUNDS_MAX
    empty = api_route(source(rounds=list))
    assert get(empty, "/api/v1/rounds") == (200, {"rounds": [], "first": None, "last": None})


def test_events_after_a_sequence_number() -> None:
    route = api_route(source())
    assert get(route, "/api/v1/events?since=7")[1] == {
        "run": "first",
        "events": [{"seq": 8, "message": "so"}],
    }
    assert len(get(route, "/api/v1/events")[1]["events"]) == 4


def test_numbers_that_are_not_finite_are_null() -> None:
    assert get(api_route(source()), "/api/v1/status")[1]["loss"] is None


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("rounds?limit=0", 400),
        (f"rounds?limit={ROUNDS_MAX + 1}", 400),
        ("rounds?since=-1", 400),
        ("rounds?since=1e3", 400),
        ("rounds?since=%31%32x", 400),
        ("rounds?since=\u0661", 400),
        ("rounds?since=99999999999999999999", 400),
        ("rounds?since=1&since=2", 400),
        ("rounds?since", 400),
        ("rounds?since=", 400),
        ("rounds?until=4", 400),
        ("rounds?" + "&".join(f"a{n}=1" for n in range(20)), 400),
        ("events?limit=4", 400),
        ("status?x=1", 400),
        ("sites?x=1", 400),
        ("rounds/1?x=1", 400),
        ("rounds/1/peers/Site_B", 400),
        ("rounds/1/peers/%2e%2e", 400),
        ("rounds/1/peers/<script>", 400),
        ("rounds/9223372036854775807", 400),
        ("rounds/-1", 404),
        ("rounds/one", 404),
        ("rounds/1/", 404),
        ("rounds/1/peers/", 404),
        ("rounds/1/peers/site-b/more", 404),
        ("rounds/", 404),
        ("", 404),
        ("../../etc/passwd", 404),
        ("pause", 404),
    ],
)
def test_invalid_requests_get_a_json_error(target: str, status: int) -> None:
    found, data = get(api_route(source()), f"/api/v1/{target}")
    assert found == status
    assert data["error"]


def test_other_paths_are_left_to_other_routes() -> None:
    route = api_route(source())
    assert route(Request("/metrics", "")) is None
    assert route(Request("/api/v2/status", "")) is None


def test_a_busy_node_and_an_unreadable_journal_are_503() -> None:
    status, data = get(api_route(source(status=stuck)), "/api/v1/status")
    assert (status, data["error"]) == (503, "the node is too busy to answer")
    status, data = get(api_route(source(round=broken)), "/api/v1/rounds/1")
    assert status == 503
    assert "secret" not in json.dumps(data)


def test_a_round_has_an_explanation_of_every_verdict(journal: Path) -> None:
    status, data = get(api_route(source(journal)), "/api/v1/rounds/1")
    assert (status, data["round"], data["state"]) == (200, 1, "completed")
    refused = next(verdict for verdict in data["verdicts"] if verdict["peer"] == C)
    assert (refused["fate"], refused["reason"]) == ("rejected", "too_far")
    assert "farther from ours" in refused["about"]
    assert re.fullmatch("[0-9a-f]{64}", refused["digest"])
    assert data["merge"][0] == "merged into our model: site-b"
    assert not {"heads", "signature"} & set(re.findall(r'"(\w+)":', json.dumps(data)))
    status, data = get(api_route(source(journal)), "/api/v1/rounds/7")
    assert (status, data["error"]) == (404, "there is no round 7 in this site's journal")


def test_an_explanation_has_every_measurement_with_its_limit(journal: Path) -> None:
    route = api_route(source(journal))
    status, data = get(route, f"/api/v1/rounds/2/peers/{C}")
    distance = next(line for line in data["guard"] if line["name"] == "distance")
    assert (status, data["fate"], data["round"]) == (200, "rejected", 2)
    assert (distance["value"], distance["limit"], distance["holds"]) == (1.9, 0.5, False)
    status, data = get(route, "/api/v1/rounds/2/peers/site-x")
    assert (status, data["error"]) == (404, "round 2 had no peer `site-x`")


def test_a_round_summary_names_the_failed_checks(tmp_path: Path) -> None:
    sites = three_sites(tmp_path, rounds=1)
    [entry] = sites[A].round_journal.rounds()
    for site in sites.values():
        site.close()
    short = round_summary(entry)
    assert (short["accepted"], short["rejected"], short["missing"]) == (1, 1, 0)
    assert (short["threshold"], short["before"], short["after"]) == (
        0.6,
        {"loss": 1.5},
        {"loss": 1.25},
    )
    failed = {verdict["peer"]: verdict["failed"] for verdict in short["verdicts"]}
    expected = {"name": "distance", "value": 1.9, "limit": 0.5, "at_most": True}
    assert failed == {B: [], C: [expected]}


def test_the_status_has_explanations_and_no_process_ids() -> None:
    far = {"name": B, "reason": "too_far", "details": {"tensor": "head.weight"}}
    peers = [far, {"name": C, "reason": None}]
    shown = status_view({"name": A, "worker_pid": 4711, "peers": peers})
    assert "4711" not in json.dumps(shown)
    assert "`head.weight` is farther from ours" in shown["peers"][0]["reason_about"]
    assert shown["peers"][1]["reason_about"] is None


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("cannot open /data/patients/doe.png: gone", "cannot open [a path]: gone"),
        ("cannot open '/data/John Doe/1.png'", "cannot open [a path]"),
        ("in ../scans/1.dcm, line 3", "in [a path], line 3"),
        ("C:\\scans\\doe.dcm is damaged", "[a path] is damaged"),
        ("~/scans/doe.dcm", "[a path]"),
        ("metrics on http://127.0.0.1:9464/metrics", "metrics on http://127.0.0.1:9464/metrics"),
        ("3/4 of the samples, accuracy 0.9", "3/4 of the samples, accuracy 0.9"),
    ],
)
def test_paths_in_log_messages_are_replaced(message: str, shown: str) -> None:
    assert without_paths(message) == shown
    assert event_view({"seq": 1, "message": message}) == {"seq": 1, "message": shown}


def test_the_dashboards_files_have_a_strict_content_security_policy() -> None:
    route = page_route()
    index = route(Request("/", ""))
    assert index is not None
    named = re.findall(r'(?:src|href)="(page/[^"]+)"', index.body.decode())
    assert "page/main.js" in named
    for name in named:
        answer = route(Request(f"/{name}", ""))
        assert answer is not None, name
        assert answer.headers["Content-Security-Policy"] == POLICY
    for missing in ("/page/", "/page/../api.py", "/page/index.html", "/page/..%2fapi.py", "/x"):
        assert route(Request(missing, "")) is None


def test_the_dashboard_has_no_inline_code_foreign_urls_or_html_strings() -> None:
    files = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]*\ssrc=)", files["index.html"])
    for name, text in files.items():
        addresses = re.findall(r"""["'(]((?:https?:)?//[^"')]*)""", text)
        assert [one for one in addresses if one != "http://www.w3.org/2000/svg"] == [], name
        for call in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert call not in text, name
