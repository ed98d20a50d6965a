"""Serves one page for all sites of a local federation.

The page is the node's own, with a selection of sites and a matrix of verdicts.  Requests for a
site's data are forwarded to that site's port.
"""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from lightyear_node.lab.federation import LOOPBACK, SiteHome
from lightyear_node.lab.federation_view import malfunction_text
from lightyear_node.observe.http.api import error_response, json_response
from lightyear_node.observe.http.server import JSON, HttpServer, Request, Response, Route
from lightyear_node.observe.http.static_files import page_route
from lightyear_node.types import PeerName

ANSWER_S = 4.0
ANSWER_BYTES_MAX = 8 << 20


@contextmanager
def serving(homes: Sequence[SiteHome], malfunctions: Mapping[PeerName, str]) -> Iterator[str]:
    """Serve the page on a free port; yields its address."""
    routes = [_sites_route(homes, malfunctions), _forwarding_route(homes), page_route()]
    server = HttpServer(f"{LOOPBACK}:0", routes)
    try:
        yield f"http://{LOOPBACK}:{server.port}/"
    finally:
        server.close()


def _sites_route(homes: Sequence[SiteHome], malfunctions: Mapping[PeerName, str]) -> Route:
    sites = [
        {
            "name": home.name,
            "api": f"sites/{home.name}/api/v1",
            "about": f"sends {malfunction_text(malfunctions[home.name])}"
            if home.name in malfunctions
            else None,
        }
        for home in homes
    ]

    def answer(request: Request) -> Response | None:
        return json_response({"sites": sites}) if request.path == "/api/v1/sites" else None

    return answer


def _forwarding_route(homes: Sequence[SiteHome]) -> Route:
    addresses = {str(home.name): home.http_address for home in homes}

    def answer(request: Request) -> Response | None:
        matched = re.fullmatch(r"/sites/([a-z0-9-]+)(/api/v1/[a-z0-9/-]+)", request.path)
        if matched is None:
            return None
        name, path = matched.groups()
        if name not in addresses:
            return error_response(404, "there is no such site in this federation")
        if not re.fullmatch(r"[a-z0-9=&]*", request.query):
            return error_response(400, "invalid query")
        try:
            return _fetched(addresses[name], f"{path}?{request.query}".removesuffix("?"))
        except (OSError, http.client.HTTPException):
            return error_response(502, f"{name} does not answer", "it is starting, or has ended")

    return answer


def _fetched(address: str, path: str) -> Response:
    connection = http.client.HTTPConnection(address, timeout=ANSWER_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read(ANSWER_BYTES_MAX)
        return Response(body, JSON, response.status)
    finally:
        connection.close()
