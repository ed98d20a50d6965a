"""One page for all sites: requests to the API are forwarded to the right site, others are not."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.lab.demo_page import serving
from lightyear_node.lab.federation import SiteHome, free_ports
from lightyear_node.observe.http.server import HttpServer, Request, Response, as_json
from lightyear_node.types import PeerName

A, B = PeerName("site-a"), PeerName("site-b")


def get(address: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as answer:
        return answer.code, json.load(answer)


def home(name: PeerName, port: int) -> SiteHome:
    return SiteHome(name, Path("nowhere"), None, f"127.0.0.1:{port}")


def echo(request: Request) -> Response:
    return as_json([request.path, request.query], 418 if "teapot" in request.path else 200)


@pytest.fixture
def echoing() -> Any:
    server = HttpServer("127.0.0.1:0", [echo])
    yield server.port
    server.close()


def test_requests_are_forwarded_to_the_named_site(echoing: int) -> None:
    with serving([home(A, echoing), home(B, free_ports(1)[0])], {}) as page:
        api = f"{page}sites/site-a/api/v1"
        assert get(f"{api}/rounds?since=1&limit=2") == (
            200,
            ["/api/v1/rounds", "since=1&limit=2"],
        )
        assert get(f"{api}/rounds/3/peers/site-b")[1] == ["/api/v1/rounds/3/peers/site-b", ""]
        assert get(f"{api}/teapot")[0] == 418
        status, data = get(f"{page}sites/site-b/api/v1/status")
        assert (status, data["error"]) == (502, "site-b does not answer")


@pytest.mark.parametrize(
    ("question", "status"),
    [
        ("sites/site-c/api/v1/status", 404),
        ("sites/site-a/api/v1/rounds?since=%20", 400),
    ],
)
def test_other_requests_are_refused(echoing: int, question: str, status: int) -> None:
    with serving([home(A, echoing)], {}) as page:
        assert get(page + question)[0] == status


@pytest.mark.parametrize(
    "path", ["sites/site-a/metrics", "sites/site-a/api/v1/../../metrics", "sites/site-a/api/v1/"]
)
def test_only_the_api_is_forwarded(echoing: int, path: str) -> None:
    with serving([home(A, echoing)], {}) as page:
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(page + path, timeout=10)
        assert refused.value.code == 404
