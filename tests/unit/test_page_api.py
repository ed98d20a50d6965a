"""The page's questions: what is answered, what is refused, and what is never told."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.disclosure import (
    event_told,
    peer_told,
    round_in_short,
    round_told,
    status_told,
    without_paths,
)
from lightyear_node.errors import JournalCorrupt
from lightyear_node.observe.api import ROUNDS_MAX, Source, api_route
from lightyear_node.observe.http import Answer, Request, Route
from lightyear_node.observe.static import FOLDER, POLICY, page_route
from lightyear_node.records import PeerName
from tests.unit.annals import three_sites

A, B, C = (PeerName(f"site-{letter}") for letter in "abc")


def stuck(*asked: object) -> Any:
    raise TimeoutError


def broken(*asked: object) -> Any:
    raise JournalCorrupt("/var/lib/secret/journal.db: damaged")


def source(journal: Path | None = None, **changed: Any) -> Source:
    answers: dict[str, Any] = {
        "status": lambda: {"name": A, "loss": math.nan, "peers": []},
        "sites": lambda: [{"name": A, "api": "api/v1"}],
        "rounds": lambda: [{"round": number} for number in range(3, 500)],
        "in_short": lambda entry: entry,
        "round": lambda number: round_told(journal, number) if journal else {},
        "peer": lambda number, peer: peer_told(journal, number, peer) if journal else {},
        "events": lambda: [{"seq": seq, "message": "so"} for seq in range(5, 9)],
        "run": "first",
    }
    return Source(**(answers | changed))


def ask(route: Route, question: str) -> tuple[int, Any]:
    path, _, query = question.partition("?")
    answer = route(Request(path, query, ""))
    assert isinstance(answer, Answer)
    return answer.status, json.loads(answer.body)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Path]:
    sites = three_sites(tmp_path)
    yield sites[A].path
    for site in sites.values():
        site.close()


def numbers(route: Route, query: str) -> list[int]:
    status, data = ask(route, f"/api/v1/rounds{query}")
    assert (status, data["first"], data["last"]) == (200, 3, 499)
    return [entry["round"] for entry in data["rounds"]]


def test_rounds_come_in_bounded_pieces() -> None:
    route = api_route(source())
    assert numbers(route, "") == list(range(450, 500))
    assert numbers(route, "?limit=2") == [498, 499]
    assert numbers(route, "?since=0&limit=3") == [3, 4, 5]
    assert numbers(route, "?limit=1&since=499") == [499]
    assert numbers(route, "?since=500") == []
    assert len(numbers(route, f"?since=0&limit={ROUNDS_MAX}")) == ROUNDS_MAX
    nobody = api_route(source(rounds=list))
    assert ask(nobody, "/api/v1/rounds") == (200, {"rounds": [], "first": None, "last": None})


def test_events_are_those_after_a_number() -> None:
    route = api_route(source())
    assert ask(route, "/api/v1/events?since=7")[1] == {
        "run": "first",
        "events": [{"seq": 8, "message": "so"}],
    }
    assert len(ask(route, "/api/v1/events")[1]["events"]) == 4


def test_what_is_not_finite_is_null_because_no_browser_reads_anything_else() -> None:
    assert ask(api_route(source()), "/api/v1/status")[1]["loss"] is None


@pytest.mark.parametrize(
    ("question", "status"),
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
def test_everything_else_is_refused_in_words(question: str, status: int) -> None:
    found, data = ask(api_route(source()), f"/api/v1/{question}")
    assert found == status
    assert data["error"]


def test_only_its_own_paths_are_answered() -> None:
    route = api_route(source())
    assert route(Request("/metrics", "", "")) is None
    assert route(Request("/api/v2/status", "", "")) is None


def test_a_node_that_does_not_answer_and_a_record_that_cannot_be_read() -> None:
    status, data = ask(api_route(source(status=stuck)), "/api/v1/status")
    assert (status, data["error"]) == (503, "the node is too busy to answer")
    status, data = ask(api_route(source(round=broken)), "/api/v1/rounds/1")
    assert status == 503
    assert "secret" not in json.dumps(data)


def test_a_round_with_every_verdict_in_words(journal: Path) -> None:
    status, data = ask(api_route(source(journal)), "/api/v1/rounds/1")
    assert (status, data["round"], data["state"]) == (200, 1, "completed")
    refused = next(verdict for verdict in data["verdicts"] if verdict["peer"] == C)
    assert (refused["fate"], refused["reason"]) == ("rejected", "too_far")
    assert "farther from ours" in refused["about"]
    assert re.fullmatch("[0-9a-f]{64}", refused["digest"])
    assert data["merge"][0] == "merged into our model: site-b"
    assert not {"heads", "signature"} & set(re.findall(r'"(\w+)":', json.dumps(data)))
    status, data = ask(api_route(source(journal)), "/api/v1/rounds/7")
    assert (status, data["error"]) == (404, "there is no round 7 in this site's record")


def test_an_explanation_has_every_number_beside_its_limit(journal: Path) -> None:
    route = api_route(source(journal))
    status, data = ask(route, f"/api/v1/rounds/2/peers/{C}")
    distance = next(line for line in data["guard"] if line["name"] == "distance")
    assert (status, data["fate"], data["round"]) == (200, "rejected", 2)
    assert (distance["value"], distance["limit"], distance["holds"]) == (1.9, 0.5, False)
    status, data = ask(route, "/api/v1/rounds/2/peers/site-x")
    assert (status, data["error"]) == (404, "round 2 had no peer `site-x`")


def test_a_round_in_short_says_what_did_not_hold(tmp_path: Path) -> None:
    sites = three_sites(tmp_path, rounds=1)
    [entry] = sites[A].ledger.rounds()
    for site in sites.values():
        site.close()
    short = round_in_short(entry)
    assert (short["accepted"], short["rejected"], short["missing"]) == (1, 1, 0)
    assert (short["threshold"], short["before"], short["after"]) == (
        0.6,
        {"loss": 1.5},
        {"loss": 1.25},
    )
    failed = {verdict["peer"]: verdict["failed"] for verdict in short["verdicts"]}
    expected = {"name": "distance", "value": 1.9, "limit": 0.5, "at_most": True}
    assert failed == {B: [], C: [expected]}


def test_the_status_has_words_and_no_process_numbers() -> None:
    peers = [{"name": B, "reason": "too_far"}, {"name": C, "reason": None}]
    told = status_told({"name": A, "worker_pid": 4711, "peers": peers})
    assert "4711" not in json.dumps(told)
    assert "farther from ours" in told["peers"][0]["reason_about"]
    assert told["peers"][1]["reason_about"] is None


@pytest.mark.parametrize(
    ("said", "told"),
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
def test_no_path_of_a_file_leaves_with_the_log(said: str, told: str) -> None:
    assert without_paths(said) == told
    assert event_told({"seq": 1, "message": said}) == {"seq": 1, "message": told}


def test_the_pages_files_come_from_the_package_with_a_strict_policy() -> None:
    route = page_route()
    index = route(Request("/", "", ""))
    assert index is not None
    named = re.findall(r'(?:src|href)="(page/[^"]+)"', index.body.decode())
    assert "page/main.js" in named
    for name in named:
        answer = route(Request(f"/{name}", "", ""))
        assert answer is not None, name
        assert answer.headers["Content-Security-Policy"] == POLICY
    for missing in ("/page/", "/page/../api.py", "/page/index.html", "/page/..%2fapi.py", "/x"):
        assert route(Request(missing, "", "")) is None


def test_nothing_on_the_page_is_inline_foreign_or_made_from_markup() -> None:
    files = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]*\ssrc=)", files["index.html"])
    for name, text in files.items():
        addresses = re.findall(r"""["'(]((?:https?:)?//[^"')]*)""", text)
        assert [one for one in addresses if one != "http://www.w3.org/2000/svg"] == [], name
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in text, name
