"""A stub of a node: the real dashboard and API with invented data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightyear_node.observe.http.api import ApiSource, api_route
from lightyear_node.observe.http.server import HttpServer
from lightyear_node.observe.http.static_files import page_route
from tests.support.watched_page import OPEN_PAGES


def peer(name: str, **changed: Any) -> dict[str, Any]:
    return {
        "name": name,
        "state": "reachable",
        "about": "",
        "round": 5,
        "phase": "training",
        "verdict": "accepted",
        "reason": "ok",
        "agreement": 0.97,
        "verdict_round": 4,
        "rejected_in_a_row": 0,
        "left_out": 0,
        "differs": "",
        "opinion": "",
        "reason_about": "it was accepted: its model was merged into ours",
        "reason_advice": "nothing",
    } | changed


def status(peers: Sequence[dict[str, Any]], **changed: Any) -> dict[str, Any]:
    return {
        "name": "site-a",
        "federation": "made-up",
        "rounds": 2000,
        "round": 5,
        "phase": "collecting",
        "waiting": "round 5: waiting for site-b",
        "finished": False,
        "progress": None,
        "threshold": 0.6,
        "certificate_expires": "2030-01-01T00:00:00+00:00",
        "disk": {"free": 1 << 30, "problem": None},
        "problems": [],
        "harm": None,
        "bytes": {"raw": 1 << 24, "wire": 1 << 23, "raw_sent": 0, "wire_sent": 0},
        "peers": list(peers),
        "paused": False,
        "blocked": [],
        "quarantined": [],
    } | changed


def round_of(number: int, names: Sequence[str], rejected: Sequence[str] = ()) -> dict[str, Any]:
    wave = (number * 37 % 100) / 1000
    return {
        "round": number,
        "time": "2030-01-01T00:00:00Z",
        "cause": "all",
        "accepted": len(names) - len(rejected),
        "rejected": len(rejected),
        "missing": 0,
        "before": {"accuracy": 0.8 + wave, "loss": 0.4},
        "after": {"accuracy": 0.85 + wave, "loss": 0.3},
        "model": "ab" * 32,
        "threshold": 0.6,
        "dropped": [],
        "kept_local": False,
        "verdicts": [
            {
                "peer": name,
                "fate": "rejected" if name in rejected else "accepted",
                "reason": "too_far" if name in rejected else "ok",
                "score": 0.4 + wave if name in rejected else 0.9 + wave,
                "failed": [],
            }
            for name in names
        ],
    }


@contextmanager
def serving(
    status: dict[str, Any],
    rounds: Sequence[dict[str, Any]] = (),
    events: Sequence[dict[str, Any]] = (),
) -> Iterator[str]:
    def unavailable(*args: object) -> dict[str, Any]:
        raise TimeoutError

    source = ApiSource(
        status=lambda: status,
        sites=lambda: [{"name": status["name"], "api": "api/v1"}],
        rounds=lambda: rounds,
        in_short=dict,
        round=unavailable,
        peer=unavailable,
        events=lambda: events,
        run="one",
    )
    server = HttpServer("127.0.0.1:0", [api_route(source), page_route()])
    try:
        yield f"http://127.0.0.1:{server.port}/"
    finally:
        for page in OPEN_PAGES:
            page.close()
        server.close()
